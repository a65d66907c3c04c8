"""`tercet eval …`: each function is a command. Nothing heavy is imported here. Every one ends with one JSON line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tercet.inference.commands import Device, Dtype, Plot, Run

if TYPE_CHECKING:
    from tercet.inference.load import LanguageModel


def perplexity(
    run: Run,
    sequences: int = 32,
    seq_len: int | None = None,
    batch: int = 4,
    plot: Plot = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """Loss on held-out data by position in the context: does it keep falling as there is more to read?

    Args:
        sequences: Held-out sequences to read.
        seq_len: Tokens per sequence; as in training unless given.
        batch: Sequences at once.
    """
    from tercet.inference.load import load_model
    from tercet.inference.perplexity import by_position, held_out, overall

    _check_plot(plot)
    model = load_model(run, device=device, dtype=dtype)
    warning = _beyond_training(model, run, "--seq-len", [] if seq_len is None else [seq_len])
    found = by_position(model, held_out(model, sequences=sequences, seq_len=seq_len, batch=batch))
    print(f"{'context':>15}  {'tokens':>10}  {'loss':>8}  {'perplexity':>10}")
    for s in found:
        print(f"{f'{s.first} to {s.last}':>15}  {s.tokens:>10,}  {s.loss:>8.4f}  {s.perplexity:>10.3f}")
    whole = overall(found)
    print(f"{'all':>15}  {whole.tokens:>10,}  {whole.loss:>8.4f}  {whole.perplexity:>10.3f}")
    if plot is not None:
        from tercet.inference.plots import perplexity_plot

        perplexity_plot({model.run.run.name: found}, plot)
        print(plot)
    print(json.dumps({"eval": "perplexity", "run": str(run), "step": model.step, "trained_length": model.context,
                      "warning": warning, "all": whole.as_dict(),
                      "by_position": [s.as_dict() for s in found]}))  # fmt: skip
    return 0


def needle(
    run: Run,
    lengths: tuple[int, ...] = (),
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0),
    trials: int = 8,
    style: Literal["auto", "recall", "text"] = "auto",
    seed: int = 0,
    batch: int = 8,
    plot: Plot = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """A needle in a haystack: a fact at each depth of texts of each length, asked for at the end.

    Args:
        lengths: Tokens of the texts; a quarter, half and all of the model's context unless given, where a needle fits.
        depths: Where the fact stands: 0 is the beginning, 1 the end.
        trials: Texts per length and depth.
        style: recall (noise and ab=42;), text (held-out text and a sentence); auto follows the training data.
        seed: Of the texts.
        batch: Texts at once.
    """
    from tercet.inference.load import load_model
    from tercet.inference.needle import needle as search
    from tercet.inference.needle import usual_lengths

    _check_plot(plot)
    model = load_model(run, device=device, dtype=dtype)
    sizes = lengths or usual_lengths(model, style)
    warning = _beyond_training(model, run, "--lengths", sizes)
    found = []
    for result in search(model, lengths=sizes, depths=depths, trials=trials, style=style, seed=seed, batch=batch):
        found.append(result)
        print(
            f"{result.length:>9,} tokens, depth {result.depth:>4.0%}: {result.right} of {result.asked}, "
            f"loss {result.nats:.3f}",
            flush=True,
        )
    if plot is not None:
        from tercet.inference.plots import needle_map

        needle_map(found, plot)
        print(plot)
    print(json.dumps({"eval": "needle", "run": str(run), "step": model.step, "trained_length": model.context,
                      "warning": warning, "found": [f.as_dict() for f in found]}))  # fmt: skip
    return 0


def recall(
    runs: tuple[Path, ...],
    length: int | None = None,
    documents: int = 64,
    batch: int = 8,
    plot: Plot = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """Accuracy on the synthetic recall task by distance to the fact, for several runs side by side.

    Args:
        runs: Run folders of models trained on the recall task.
        length: Tokens per document; as in training unless given.
        documents: Documents to ask.
        batch: Documents at once.
    """
    from tercet.errors import UsageError
    from tercet.inference.load import load_model
    from tercet.inference.recall import recall_by_distance, window_reach

    if not runs:
        raise UsageError("no run folder was given: tercet eval recall runs/NAME-DATE-TIME")
    _check_plot(plot)
    curves, records, reach = {}, [], None
    for run in runs:
        model = load_model(run, device=device, dtype=dtype)
        asked = model.context if length is None else length
        warning = _beyond_training(model, run, "--length", [asked])
        found = recall_by_distance(model, length=asked, documents=documents, batch=batch)
        reach = window_reach(model)
        print(f"{run}: windows alone reach {reach} tokens back")
        for r in found:
            far = "  beyond the windows" if r.first > reach else ""
            print(f"  {f'{r.first} to {r.last}':>15} tokens back: {r.accuracy:>6.1%} of {r.asked}{far}")
        curves[str(run)] = [(r.last, r.accuracy) for r in found]
        records.append(
            {"run": str(run), "step": model.step, "trained_length": model.context, "warning": warning,
             "reach": reach, "by_distance": [r.as_dict() for r in found]}
        )  # fmt: skip
    if plot is not None:
        from tercet.inference.plots import curve_plot

        curve_plot(curves, plot, mark=reach)
        print(plot)
    print(json.dumps({"eval": "recall", "runs": records}))
    return 0


def selection_map(
    run: Run,
    out: Path,
    prompt: str = "",
    prompt_file: Path | None = None,
    query: int = -1,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """Which blocks each layer really read for one token of a prompt, as a picture over the text.

    Args:
        out: The HTML page to write.
        prompt: The text.
        prompt_file: A file that holds it.
        query: The token whose reading is shown, counted from 0; -1 is the last.
    """
    from tercet.errors import TercetError
    from tercet.inference.commands import _read
    from tercet.inference.load import load_model
    from tercet.inference.prompts import as_tokens
    from tercet.inference.selection_map import page, selections

    model = load_model(run, device=device, dtype=dtype)
    text = _read(prompt_file) if prompt_file is not None else prompt
    (tokens,) = as_tokens([text], model.tokenizer, model.config.vocab_size)
    found = selections(model, tokens)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page(tokens, model.tokenizer, found, query=query), encoding="utf-8")
    except OSError as error:
        raise TercetError(f"{out} cannot be written ({error.strerror}): name another file") from None
    print(f"{out}: {len(tokens)} tokens, {len(found)} layers")
    t = query if query >= 0 else len(tokens) + query
    read = {f"layer_{layer.layer}": sorted(layer.read_by(t)) for layer in found}
    print(json.dumps({"eval": "selection_map", "run": str(run), "query": t, "blocks": read}))
    return 0


def _check_plot(plot: Path | None) -> None:
    """Before anything is measured: an SVG by another name is a picture that nothing opens."""
    if plot is not None and plot.suffix.lower() != ".svg":
        from tercet.errors import UsageError

        raise UsageError(f"--plot {plot} does not end in .svg, and what is drawn is SVG: give a name that does")


def _beyond_training(model: LanguageModel, run: Path, flag: str, lengths: Sequence[int]) -> str | None:
    """What is said, here and in the JSON line, of lengths that training never reached; they are measured all the same:
    how a model fares there is a fair question."""
    longer = sorted({n for n in lengths if n > model.context})
    if not longer:
        return None
    from tercet.inference.longer import train_on

    warning = (
        f"{flag} {' '.join(map(str, longer))} is beyond the {model.context} tokens that {run} was trained at "
        f"(data.seq_len): what comes after the first {model.context} tells how it fares at positions that it has never "
        f"seen, not what it has learnt; to teach it these, train on: {train_on(run, longer[-1])}"
    )
    print(f"warning: {warning}", file=sys.stderr)
    return warning
