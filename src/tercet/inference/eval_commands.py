"""`tercet eval …`: each function is a command and ends by printing one line of JSON. Imports nothing heavy."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tercet.atomic_io import check_writable
from tercet.errors import UsageError
from tercet.inference.arguments import (
    DataOf,
    Device,
    Dtype,
    RulerTask,
    Run,
    at_least_one,
    check_model,
    own_text,
    read_prompt_file,
    tokenize_prompts,
)
from tercet.terminal import Columns, Progress, printable, table

if TYPE_CHECKING:
    from tercet.config.data import DataConfig
    from tercet.data.loader import Batch
    from tercet.inference.load import LanguageModel


def perplexity(
    run: Run,
    sequences: int | None = None,
    seq_len: int | None = None,
    batch: int = 4,
    data: Path | None = None,
    text_field: str = "text",
    data_of: DataOf = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """Loss by position in the context, on validation data or your own text: does more context keep helping?

    Args:
        sequences: Number of sequences; default: 32 of validation data, or all of --data.
        seq_len: Tokens per sequence; default: as in training.
        batch: Sequences per batch.
        data: Read this instead: a file or folder of text, jsonl, parquet, or shards, all of it.
        text_field: With --data: the field (jsonl) or column (parquet) with the text.
    """
    if data is not None and data_of is not None:
        raise UsageError(f"--data {data} and --data-of {data_of} are two texts to read: drop one")
    if data is None and text_field != "text":
        raise UsageError(f"--text-field {text_field} has no effect without --data: drop it")
    own = None if data is None else own_text(data, text_field)
    at_least_one(sequences=sequences, seq_len=seq_len, batch=batch)
    model, record = _open("perplexity", run, device, dtype, data_of, own)
    record["warning"] = _warn_beyond_training(model, run, "--seq-len", [seq_len or 0])
    from tercet.inference.perplexity import by_position, held_out, overall, target_bytes

    if sequences is None and own is None:
        sequences = 32
    sizes, progress = [], Progress((sequences or 0) * (seq_len or model.context))

    def batches() -> Iterator[Batch]:
        for loaded in held_out(model, sequences=sequences or 1 << 40, seq_len=seq_len, batch=batch, own=own):
            sizes.append(target_bytes(model, loaded))
            yield loaded
            progress.update(loaded.tokens.numel())

    buckets = by_position(model, batches())
    total = overall(buckets)
    rows = [{"context": f"{b.first} to {b.last}", **b.as_dict()} for b in buckets]
    columns: Columns = {
        "context": ("context", str), "tokens": ("tokens", "{:,}".format), "loss": ("loss", "{:.4f}".format),
        "perplexity": ("perplexity", "{:.3f}".format),
    }  # fmt: skip
    print(table([*rows, {"context": "all", **total.as_dict()}], columns))
    bits = total.nats / math.log(2) / max(1, sum(sizes))
    print(f"{bits:.4f} bits per byte over {sum(sizes):,} bytes of text, comparable between tokenizers")
    record |= {
        "data": None if own is None else [own.source, *own.path], "bits_per_byte": bits, "bytes": sum(sizes),
        "all": total.as_dict(), "by_position": [b.as_dict() for b in buckets],
    }  # fmt: skip
    return _finish(record)


def context(
    run: Run,
    lengths: tuple[int, ...] = (),
    last: int | None = None,
    sequences: int = 32,
    data_of: DataOf = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """Loss of the last tokens of long validation documents, by the length of the context before them.

    Args:
        lengths: Tokens to read, including the scored ones; default: an eighth to all of the model's context.
        last: Tokens to score at the end of each; default: the shortest length.
        sequences: Sequences to read, each from one document of at least the greatest length.
    """
    at_least_one(sequences=sequences, last=last, lengths=lengths)
    model, record = _open("context", run, device, dtype, data_of)
    from tercet.inference.perplexity import gain, loss_with_context, within_documents

    sizes = sorted(set(lengths) or {max(1, model.context // n) for n in (8, 4, 2, 1)})
    scored = sizes[0] if last is None else last
    if scored > sizes[0]:
        raise UsageError(f"--last {scored} is more than the shortest of --lengths, {sizes[0]}: give at most that")
    record["warning"] = _warn_beyond_training(model, run, "--lengths", sizes)
    losses: dict[int, list[float]] = {size: [] for size in sizes}  # nats per token of each sequence
    progress = Progress(sum(sizes) * sequences)
    for loaded in within_documents(model, length=sizes[-1], sequences=sequences, last=scored):
        for size in sizes:
            losses[size].append(loss_with_context(model, loaded, size, scored))
            progress.update(size)
    count = len(losses[sizes[0]])
    print(f"the last {scored:,} tokens of {count} sequences, each from one document")
    rows: list[dict[str, Any]] = []
    for size in sizes:
        more, error = (None, None) if size == sizes[0] else gain(losses[size], losses[sizes[0]])
        loss = statistics.fmean(losses[size])
        rows.append({"tokens": size, "loss": loss, "gain": more, "error": error, "losses": losses[size]})
    columns: Columns = {
        "tokens": ("tokens read", "{:,}".format), "loss": ("loss", "{:.4f}".format),
        "gain": (f"against {sizes[0]:,}", "{:+.4f}".format), "error": ("±", "{:.4f}".format),
    }  # fmt: skip
    print(table(rows, columns))
    return _finish(record | {"last": scored, "sequences": count, "by_context": rows})


def ruler(
    run: Run,
    lengths: tuple[int, ...] = (),
    tasks: tuple[RulerTask, ...] = (),
    questions: int = 400,
    depths: int = 10,
    wording: Literal["held-out", "training"] = "held-out",
    seed: int = 0,
    data_of: DataOf = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> int:
    """RULER's synthetic tasks, by length: needles, variable tracing and word lists, in our own wording.

    Args:
        lengths: Tokens per question, answer included, such as 1024,4096; default: a quarter to all of the context.
        tasks: Tasks to ask; default: all.
        questions: Questions per length and task.
        depths: Positions of the fact in the single-needle tasks, evenly spaced, at most one per question; each gets its
            share of the questions.
        wording: Templates: held-out (never used in training), or those of data.retrieval. Keys are new in both.
        seed: Random seed of the questions.
    """
    at_least_one(questions=questions, depths=depths, lengths=lengths)
    model, record = _open("ruler", run, device, dtype, data_of)
    from tercet.inference.ruler import TASKS, RulerResult, ask, table_of

    sizes = lengths or tuple(n for n in (model.context // 4, model.context // 2) if n >= 128) + (model.context,)
    record["warning"] = _warn_beyond_training(model, run, "--lengths", sizes)
    progress = Progress(sum(sizes) * len(tasks or TASKS) * questions)
    results: list[RulerResult] = []
    skipped: list[str] = []
    for found in ask(model, lengths=sizes, tasks=tasks or TASKS, questions=questions, depths=depths, wording=wording,
                     seed=seed, progress=progress.update):  # fmt: skip
        if isinstance(found, list):
            results += found
            print(f"{found[0].task} at {found[0].length:,} tokens: {found[0].score:.1%}{progress.left()}", flush=True)
        else:
            skipped.append(found)
            print(f"skipped: {found}", file=sys.stderr)
    if not results:
        raise UsageError(skipped[0])
    print(f"correct answers in percent, [95% interval]; questions per length and task: {questions};")
    print(f"{wording} wording; not comparable with published RULER scores")
    print(table_of(results))
    found_all = [result.as_dict() for result in results]
    return _finish(record | {"wording": wording, "seed": seed, "skipped": skipped, "found": found_all})


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
    check_writable("OUT", out)
    text = read_prompt_file(prompt_file) if prompt_file is not None else prompt
    if not text:
        raise UsageError("no prompt given: use --prompt TEXT or --prompt-file FILE")
    model, record = _open("selection-map", run, device, dtype)
    from tercet.inference.selection_map import record_selections, selection_page

    (tokens,) = tokenize_prompts([text], model.tokenizer, model.config.vocab_size)
    record["warning"] = _warn_beyond_training(model, run, "a prompt length of", [len(tokens)])
    layers = record_selections(model, tokens)
    out.write_text(selection_page(tokens, model.tokenizer, layers, query=query), encoding="utf-8")
    print(f"{out}: {len(tokens)} tokens, {len(layers)} layers")
    t = query if query >= 0 else len(tokens) + query
    blocks = {f"layer_{layer.layer}": sorted(layer.selected_by(t)) for layer in layers}
    return _finish(record | {"query": t, "blocks": blocks})


def _open(
    name: str, run: Path, device: Device, dtype: Dtype, data_of: Path | None = None, own: DataConfig | None = None
) -> tuple[LanguageModel, dict[str, Any]]:
    """A model, and the beginning of the evaluation's JSON line. Prints the data and seed of an evaluation that reads
    validation text, which decide what is held out: two models are comparable on the same text only. own: text that is
    read instead."""
    for folder in (run, data_of):
        if folder is not None:
            check_model(folder)
    from tercet.inference.load import load_model

    model = load_model(run, device=device, dtype=dtype, data_of=data_of)
    if name in ("perplexity", "context", "ruler"):
        data, seed = (own, "") if own else (model.run.data, f", seed {model.run.run.seed}")
        print(" ".join(["all text of" if own else "validation text of", data.source, *data.path]) + seed, flush=True)
    about = {"eval": name, "run": str(run), "step": model.step, "trained_length": model.context}
    return model, about | {"data_of": None if data_of is None else str(data_of)}


def _warn_beyond_training(model: LanguageModel, run: Path, flag: str, lengths: Sequence[int]) -> str | None:
    """Warn about lengths beyond the training length; they are still measured. Returns the warning for the JSON line."""
    longer = sorted({n for n in lengths if n > model.context})
    if not longer:
        return None
    warning = (
        f"{flag} {' '.join(map(str, longer))} is beyond the {model.context} tokens that {run} was trained with, so "
        f"results show extrapolation to unseen positions: train at this length first (train.init_from, data.seq_len)"
    )
    print(f"warning: {printable(warning)}", file=sys.stderr)
    return warning


def _finish(record: dict[str, Any]) -> int:
    """End with the line of JSON."""
    print(json.dumps(record))
    return 0
