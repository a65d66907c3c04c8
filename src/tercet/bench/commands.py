"""The `tercet bench` commands. Torch is imported when a benchmark starts."""

from __future__ import annotations

import math
from typing import Literal

from tercet.bench.settings import parse_settings
from tercet.config.sections import Switch
from tercet.errors import TercetError, UsageError
from tercet.inference.arguments import check_known


def attention(
    *,
    shapes: tuple[str, ...] = ("P8k", "P64k", "C8x2k", "C4x4k", "C1x16k"),
    inputs: tuple[str, ...] = ("random", "smooth"),
    correlation: float = 0.996,
    dense: tuple[str, ...] = ("cudnn", "flash"),
    dense_limit: int = 65536,
    rows: int = 24,
    budget: float = 0.6,
    profile: bool = False,
    graph: bool = True,
    dense_once: bool = False,
) -> int:
    """Check and time the NSA operator against dense attention on this machine's GPU.

    Args:
        shapes: P8k … P64k (64 heads of 128), C8x2k … C1x1024k (12 heads of 64; C32x2k … C2x32k
            and C1x64k hold 65,536 tokens), M4x4k, M1x16k.
        inputs: random; smooth, where neighbouring queries select similar blocks; recorded, with
            blocks that a trained model selected in text, up to 64k tokens; recorded:FILE, with those of your model
            (`tercet eval selections`).
        correlation: Correlation of successive queries in smooth inputs.
        dense: Dense attention to compare with: cudnn, flash or both.
        dense_limit: Skip dense attention beyond this length.
        rows: Rows to check against fp64 at full length.
        budget: Seconds per timing.
        profile: Also print the time of each kernel.
        graph: Also time CUDA graphs, at head size 64.
        dense_once: Time dense attention once per shape, not once per kind of inputs.
    """
    _check_at_least(1, rows=rows)
    _check_at_least(0, dense_limit=dense_limit)
    if not 0 <= correlation <= 1:
        raise UsageError(f"--correlation {correlation:g} is out of range: give a number from 0 to 1")
    if not 0 < budget < math.inf:
        raise UsageError(f"--budget {budget:g} is out of range: give a number of seconds above 0")
    from tercet.bench.attention import Options, main

    return main(shapes, inputs, Options(correlation, dense, dense_limit, rows, budget, profile, graph), dense_once)


def layer(
    *,
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384),
    tokens: int = 16384,
    compile: bool = False,
    repeats: int = 10,
) -> int:
    """Time the whole NSA layer (projections, RoPE, compression, gates) against the dense one, forward + backward.

    Args:
        lengths: Sequence lengths.
        tokens: Tokens per batch; the batch size is this divided by the length.
        compile: Use torch.compile.
        repeats: Timings per layer; the median is reported.
    """
    _check_at_least(1, lengths=lengths, tokens=tokens, repeats=repeats)
    from tercet.bench.layer import main

    return main(lengths, tokens, compile, repeats)


def tune(*, shapes: tuple[str, ...] = ("P64k", "C1x16k"), kernels: tuple[str, ...] = (), workers: int = 8) -> int:
    """Search launch settings for this GPU and print rows for the kernel table.

    Args:
        shapes: As for `tercet bench attention`.
        kernels: Kernel names; default: all.
        workers: Processes that compile before timing starts.
    """
    from tercet.attention.hardware import TRITON_INSTALLED

    _check_at_least(1, workers=workers)
    if not TRITON_INSTALLED:
        raise TercetError("tercet bench tune times Triton's kernels and Triton is not installed: pip install triton")
    from tercet.bench.tune import CANDIDATES, main

    return main(shapes, kernels or tuple(CANDIDATES), workers)


def decode(
    *,
    batches: tuple[int, ...] = (1, 16),
    contexts: tuple[int, ...] = (2048, 16384, 65536, 262144),
    heads: str = "P",
    attention: bool = True,
    preset: str = "m7c",
    model_batches: tuple[int, ...] = (1, 16),
    model_contexts: tuple[int, ...] = (2048, 8192, 32768, 65536, 262144),
    steps: int = 64,
    selector: Literal["compressed", "learned"] | None = None,
    settings: str = "",
    profile: bool = False,
) -> int:
    """Time decoding against dense attention: the whole model and, on a GPU, the attention step alone.

    Args:
        batches: Batch sizes of the attention step.
        contexts: Tokens in the cache of the attention step.
        heads: P (64 query heads, 4 KV heads, head size 128) or C (12, 2, 64).
        attention: Measure the attention step.
        preset: Model to decode with; its dense baseline is measured too.
        model_batches: Batch sizes of the whole model; empty to skip it.
        model_contexts: Prompt lengths of the whole model; empty to skip it.
        steps: Tokens generated per timing.
        selector: What scores the blocks; default: as in the preset, and compressed for the attention step.
        settings: More configuration keys of the whole model, e.g. model.gate=none,model.compress_selected_keys=false.
        profile: Also print the time of each kernel of the attention step.
    """
    _check_at_least(1, batches=batches, contexts=contexts, steps=steps)
    _check_at_least(1, model_batches=model_batches, model_contexts=model_contexts)
    from tercet.bench.decode import HEADS, main

    check_known("--heads", [heads], HEADS)
    return main(
        batches=batches, contexts=contexts, heads=heads, attention=attention, preset=preset,
        model_batches=model_batches, model_contexts=model_contexts, steps=steps, profile=profile, selector=selector,
        settings=parse_settings(settings),
    )  # fmt: skip


def train(
    *,
    preset: str = "m7c",
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768, 65536),
    tokens: int = 65536,
    batches: tuple[int, ...] = (),
    batch_length: int = 2048,
    kinds: tuple[str, ...] = ("nsa", "dense"),
    steps: int = 10,
    repeats: int = 3,
    checkpointing: str = "none",
    packed: tuple[str, ...] = (),
    plain: tuple[str, ...] = (),
    statistics: bool = True,
    compile: Switch = "auto",
    cuda_graph: Switch = "off",
    settings: str = "",
    device: Literal["auto", "cuda", "cpu"] = "auto",
    seconds: float = 600,
    out: str | None = None,
    picture: str | None = None,
    plot: str | None = None,
) -> int:
    """Check and time whole training steps of a model and its dense baseline, over lengths and batch sizes.

    Args:
        preset: The model; its dense baseline is the preset with the suffix -dense.
        lengths: Sequence lengths, each with `tokens` tokens per step.
        tokens: Tokens per step for --lengths.
        batches: Batch sizes to measure at --batch-length too.
        batch_length: Sequence length for --batches.
        kinds: nsa, dense or both.
        steps: Steps per log interval.
        repeats: Timed intervals after warm-up; the median is reported. 0: time the first interval, with compilation.
        checkpointing: Activation checkpointing: none, selective or full.
        packed: Kinds (nsa, dense or both) whose documents are packed into one row with cu_seqlens.
        plain: Packed kinds to measure with one row per document too.
        statistics: Collect gate and selection statistics in the last step of each interval, as a run does.
        compile: auto (on a GPU), on or off.
        cuda_graph: on: capture forward and backward as a CUDA graph, or fail; auto: if steps are launch-bound; off.
        settings: More configuration keys, e.g. model.nsa.window=512,model.branches=selected,window.
            train.init_from=RUN measures trained weights on the data of data.source, instead of fresh weights on random
            tokens.
        device: auto, cuda or cpu.
        seconds: Time limit per cell; a slower cell is reported as too slow.
        out: Also write the JSON line to this file.
        picture: Plot heat maps into this file, SVG or PNG (needs matplotlib).
        plot: Measure nothing; plot the results of an earlier --out file into --picture.
    """
    from pathlib import Path

    _check_at_least(1, lengths=lengths, batches=batches, tokens=tokens, batch_length=batch_length, steps=steps)
    _check_at_least(0, repeats=repeats)
    from tercet.bench.train import PICTURES, check_place, check_settings, main, read_results

    if plot is not None:
        from tercet.bench.plots import heat_maps

        if picture is None:
            raise UsageError(f"--plot {plot} needs an output file: add --picture FILE.svg")
        check_place("--picture", Path(picture), PICTURES)
        print("\n".join(heat_maps(read_results(Path(plot)), Path(picture))))
        return 0

    given = parse_settings(settings)
    check_settings(given)
    return main(
        preset=preset, kinds=kinds, lengths=lengths, tokens=tokens, batches=batches, batch_length=batch_length,
        steps=steps, repeats=repeats, checkpointing=checkpointing, packed=packed, plain=plain, statistics=statistics,
        seconds=seconds,
        flags=given | {"train.compile": compile, "train.cuda_graph": cuda_graph}
        | ({} if device == "auto" else {"run.device": device}),
        out=Path(out) if out else None, picture=Path(picture) if picture else None,
    )  # fmt: skip


def _check_at_least(least: int, **flags: int | tuple[int, ...]) -> None:
    for name, given in flags.items():
        smallest = min(given, default=least) if isinstance(given, tuple) else given
        if smallest < least:
            raise UsageError(f"--{name.replace('_', '-')} {smallest} is too small: give at least {least}")
