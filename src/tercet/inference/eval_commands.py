"""`tercet eval …`: each function is a command and ends by printing one line of JSON. Imports nothing heavy."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tercet.inference.commands import Device, Dtype, Plot, Run, read_prompt_file

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
    """Loss on validation data by position in the context: does more context keep helping?

    Args:
        sequences: Number of validation sequences.
        seq_len: Tokens per sequence; default: as in training.
        batch: Sequences per batch.
    """
    from tercet.inference.load import load_model
    from tercet.inference.perplexity import by_position, held_out, overall

    _check_plot(plot)
    model = load_model(run, device=device, dtype=dtype)
    warning = _warn_beyond_training(model, run, "--seq-len", [] if seq_len is None else [seq_len])
    buckets = by_position(model, held_out(model, sequences=sequences, seq_len=seq_len, batch=batch))
    print(f"{'context':>15}  {'tokens':>10}  {'loss':>8}  {'perplexity':>10}")
    for b in buckets:
        print(f"{f'{b.first} to {b.last}':>15}  {b.tokens:>10,}  {b.loss:>8.4f}  {b.perplexity:>10.3f}")
    total = overall(buckets)
    print(f"{'all':>15}  {total.tokens:>10,}  {total.loss:>8.4f}  {total.perplexity:>10.3f}")
    if plot is not None:
        from tercet.inference.plots import perplexity_plot

        perplexity_plot({model.run.run.name: buckets}, plot)
        print(plot)
    print(json.dumps({"eval": "perplexity", "run": str(run), "step": model.step, "trained_length": model.context,
                      "warning": warning, "all": total.as_dict(),
                      "by_position": [b.as_dict() for b in buckets]}))  # fmt: skip
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
    """Needle in a haystack: hide a fact at each depth of texts of each length and query it at the end.

    Args:
        lengths: Text lengths in tokens; default: a quarter, half and all of the model's context, if a needle fits.
        depths: Position of the fact: 0 is the beginning, 1 the end.
        trials: Texts per length and depth.
        style: recall (noise with facts like ab=42;) or text (validation text with a sentence); auto: by training data.
        seed: Random seed of the texts.
        batch: Texts per batch.
    """
    from tercet.inference.load import load_model
    from tercet.inference.needle import default_lengths, find_needles

    _check_plot(plot)
    model = load_model(run, device=device, dtype=dtype)
    sizes = lengths or default_lengths(model, style)
    warning = _warn_beyond_training(model, run, "--lengths", sizes)
    results = []
    for result in find_needles(model, lengths=sizes, depths=depths, trials=trials, style=style, seed=seed, batch=batch):
        results.append(result)
        print(
            f"{result.length:>9,} tokens, depth {result.depth:>4.0%}: {result.right} of {result.asked}, "
            f"loss {result.nats:.3f}",
            flush=True,
        )
    if plot is not None:
        from tercet.inference.plots import needle_map

        needle_map(results, plot)
        print(plot)
    print(json.dumps({"eval": "needle", "run": str(run), "step": model.step, "trained_length": model.context,
                      "warning": warning, "found": [r.as_dict() for r in results]}))  # fmt: skip
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
    """Accuracy on the synthetic recall task by distance to the fact, for one or more runs.

    Args:
        runs: Run folders of models trained on the recall task.
        length: Tokens per document; default: as in training.
        documents: Number of documents.
        batch: Documents per batch.
    """
    from tercet.errors import UsageError
    from tercet.inference.load import load_model
    from tercet.inference.recall import recall_by_distance, window_reach

    if not runs:
        raise UsageError("no run folder given: tercet eval recall runs/NAME-DATE-TIME")
    _check_plot(plot)
    curves, records, reach = {}, [], None
    for run in runs:
        model = load_model(run, device=device, dtype=dtype)
        tokens = model.context if length is None else length
        warning = _warn_beyond_training(model, run, "--length", [tokens])
        buckets = recall_by_distance(model, length=tokens, documents=documents, batch=batch)
        reach = window_reach(model)
        print(f"{run}: windows alone reach {reach} tokens back")
        for b in buckets:
            far = "  beyond the windows" if b.first > reach else ""
            print(f"  {f'{b.first} to {b.last}':>15} tokens back: {b.accuracy:>6.1%} of {b.asked}{far}")
        curves[str(run)] = [(b.last, b.accuracy) for b in buckets]
        records.append(
            {"run": str(run), "step": model.step, "trained_length": model.context, "warning": warning,
             "reach": reach, "by_distance": [b.as_dict() for b in buckets]}
        )  # fmt: skip
    if plot is not None:
        from tercet.inference.plots import recall_plot

        recall_plot(curves, plot, window_reach=reach)
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
    """Show which blocks each layer selected for one token of a prompt, as an HTML page over the text.

    Args:
        out: The HTML file to write.
        prompt: The text.
        prompt_file: File with the text; - reads standard input.
        query: Index of the token, from 0; -1 is the last.
    """
    from tercet.errors import TercetError
    from tercet.inference.load import load_model
    from tercet.inference.prompts import tokenize_prompts
    from tercet.inference.selection_map import record_selections, selection_page

    model = load_model(run, device=device, dtype=dtype)
    text = read_prompt_file(prompt_file) if prompt_file is not None else prompt
    (tokens,) = tokenize_prompts([text], model.tokenizer, model.config.vocab_size)
    layers = record_selections(model, tokens)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(selection_page(tokens, model.tokenizer, layers, query=query), encoding="utf-8")
    except OSError as error:
        raise TercetError(f"cannot write {out} ({error.strerror}): choose another file") from None
    print(f"{out}: {len(tokens)} tokens, {len(layers)} layers")
    t = query if query >= 0 else len(tokens) + query
    blocks = {f"layer_{layer.layer}": sorted(layer.selected_by(t)) for layer in layers}
    print(json.dumps({"eval": "selection_map", "run": str(run), "query": t, "blocks": blocks}))
    return 0


def _check_plot(plot: Path | None) -> None:
    """Fail before measuring if the plot's file name is wrong."""
    if plot is not None and plot.suffix.lower() != ".svg":
        from tercet.errors import UsageError

        raise UsageError(f"--plot {plot} does not end in .svg, the only format: choose a name that does")


def _warn_beyond_training(model: LanguageModel, run: Path, flag: str, lengths: Sequence[int]) -> str | None:
    """Warn about lengths beyond the training length; they are still measured. Returns the warning for the JSON line."""
    longer = sorted({n for n in lengths if n > model.context})
    if not longer:
        return None
    from tercet.inference.extend_context import extend_context_command

    warning = (
        f"{flag} {' '.join(map(str, longer))} is beyond the {model.context} tokens that {run} was trained with "
        f"(data.seq_len): results after the first {model.context} tokens show extrapolation to unseen positions; to "
        f"train it at this length: {extend_context_command(run, longer[-1])}"
    )
    print(f"warning: {warning}", file=sys.stderr)
    return warning
