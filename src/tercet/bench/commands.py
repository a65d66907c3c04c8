"""The `tercet bench` commands. Torch is imported when a benchmark starts."""

from __future__ import annotations

import math
from typing import Literal

from tercet.bench.settings import parse_settings
from tercet.config.sections import ActivationCheckpointing, Switch
from tercet.errors import UsageError
from tercet.inference.arguments import at_least_one


def attention(
    *,
    scorer: Literal["compressed", "own"] = "compressed",
    exact_groups: int | None = None,
    shapes: tuple[str, ...] = (),
    inputs: tuple[str, ...] = (),
    dense: tuple[str, ...] = ("cudnn", "flash"),
    rows: int = 24,
    budget: float = 0.6,
    profile: bool = False,
) -> int:
    """Check and time an attention operator against dense attention on this machine's GPU.

    Args:
        scorer: compressed: NSA with three branches. own: block-sparse attention, 16 blocks of 64 chosen by the largest
            product of its own queries and keys in 32 channels.
        exact_groups: With own: how many KV heads choose so; the others choose by means of keys. Default: all.
        shapes: Heads, sequences and tokens: P64k (64 query heads, 4 KV heads of 128), L64k (32, 8, 128), C8x2k (12, 2,
            64), M4x4k (16, 1, 64); or BxTxHxGxD, or BxTxHxGxDxDv for another size of values. Default: P8k P64k C8x2k
            C4x4k C1x16k; for own L16k to L128k.
        inputs: random; smooth, where neighbouring queries select similar blocks. Default: both; for own random.
        dense: Dense attention to compare with: cudnn, flash or both; the ratios are to the faster one. Empty: none.
        rows: Rows to check against fp64 at full length.
        budget: Seconds per timing.
        profile: Also print the time of each kernel.
    """
    at_least_one(rows=rows)
    if not 0 < budget < math.inf:
        raise UsageError(f"--budget {budget:g} is out of range: give a number of seconds above 0")
    from tercet.bench.attention import Options, main

    if exact_groups is not None and scorer != "own":
        raise UsageError(f"--exact_groups {exact_groups} has no effect with --scorer {scorer}: use --scorer own")
    inputs = inputs or (("random",) if scorer == "own" else ("random", "smooth"))
    return main(shapes, inputs, Options(scorer, exact_groups, dense, rows, budget, profile))


def decode(
    *,
    batches: tuple[int, ...] = (1, 16),
    contexts: tuple[int, ...] = (2048, 8192, 32768, 65536, 262144),
    preset: str = "m7c",
    kinds: tuple[str, ...] = ("nsa", "dense"),
    steps: int = 64,
    settings: str = "",
    layer: bool = False,
) -> int:
    """Time decoding with a whole model against dense attention: the first token, then tokens/s.

    Args:
        batches: Batch sizes.
        contexts: Prompt lengths.
        preset: Model to decode with.
        kinds: nsa (the preset as it is), two-branch, block-sparse, dense.
        steps: Tokens generated per timing.
        settings: More configuration keys, e.g. model.selector=compressed.
        layer: Instead, one token in one attention layer of 32 heads on 8 KV heads of 128 (block-sparse, own scores).
    """
    at_least_one(batches=batches, contexts=contexts, steps=steps)
    from tercet.bench.decode import layer_main, main

    if layer:
        return layer_main(batches, contexts)
    return main(batches, contexts, preset, kinds, steps=steps, settings=parse_settings(settings, {}))


def train(
    *,
    preset: str = "m7c",
    kinds: tuple[str, ...] = ("nsa", "dense"),
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768, 65536),
    tokens: int = 65536,
    steps: int = 10,
    repeats: int = 3,
    checkpointing: tuple[ActivationCheckpointing, ...] = ("none",),
    packed: tuple[str, ...] = (),
    compile: Switch = "auto",
    cuda_graph: Switch = "off",
    settings: str = "",
    device: Literal["auto", "cuda", "cpu"] = "auto",
    seconds: float = 600,
) -> int:
    """Check and time whole training steps of a model and its dense baseline, over sequence lengths.

    Args:
        preset: The model; its dense baseline is the preset with the suffix -dense.
        kinds: nsa (the preset as it is), two-branch, block-sparse, dense.
        lengths: Sequence lengths, each with `tokens` tokens per step.
        tokens: Tokens per step.
        steps: Steps per timed interval.
        repeats: Timed intervals after warm-up; the median is reported. 0: time the first interval, with compilation.
        checkpointing: Activation checkpointing: none, selective, full.
        packed: Kinds whose documents are packed into one row with cu_seqlens. Dense is measured both ways then.
        compile: auto (on a GPU), on or off.
        cuda_graph: on: capture forward and backward as a CUDA graph, or fail; auto: with up to 16,384 tokens; off.
        settings: More configuration keys, e.g. model.nsa.window=512,model.selector=compressed.
            train.init_from=RUN measures trained weights on the data of data.source, instead of fresh weights on random
            tokens.
        device: auto, cuda or cpu.
        seconds: Time limit per cell; a slower cell is reported as too slow.
    """
    at_least_one(lengths=lengths, tokens=tokens, steps=steps)
    if wrong := [length for length in lengths if tokens % length]:
        raise UsageError(f"--tokens {tokens} is not a multiple of length {wrong[0]}: pick a multiple")
    from tercet.bench.train import OWN_KEYS, cells_of, main

    shapes = [(tokens // length, length) for length in lengths]
    given = parse_settings(settings, OWN_KEYS) | {"train.compile": compile, "train.cuda_graph": cuda_graph}
    given |= {} if device == "auto" else {"run.device": device}
    cells = cells_of(preset, kinds, shapes, checkpointing, packed, given)
    return main(cells, steps=steps, repeats=repeats, seconds=seconds)


def scaling(
    *,
    preset: str = "m7c",
    ranks: tuple[int, ...] = (1, 2, 4, 8),
    strategies: tuple[Literal["ddp", "fsdp", "hsdp", "cp"], ...] = ("ddp", "fsdp", "cp"),
    batch: int = 8,
    length: int = 2048,
    steps: int = 10,
    settings: str = "",
    device: Literal["auto", "cuda", "cpu"] = "auto",
    seconds: float = 600,
) -> int:
    """Time training steps on this machine's GPUs: tokens/s, efficiency, exposed communication and memory.

    Args:
        preset: The model.
        ranks: Numbers of ranks; with more than GPUs, ranks share them, and the speeds mean nothing.
        strategies: ddp, fsdp, hsdp, cp.
        batch: Sequences per rank.
        length: Tokens per sequence.
        steps: Steps that are timed, after warm-up.
        settings: More configuration keys, e.g. parallel.sharding=grad_op,train.compile=off.
        device: auto, cuda or cpu.
        seconds: Time limit per cell.
    """
    at_least_one(ranks=ranks, batch=batch, length=length, steps=steps)
    from tercet.bench.scaling import main
    from tercet.bench.train import OWN_KEYS

    own = {key: "--batch and --length" for key in OWN_KEYS if "tokens" in key or key == "data.seq_len"}
    given = parse_settings(settings, own) | ({} if device == "auto" else {"run.device": device})
    return main(preset, ranks, strategies, given, batch=batch, length=length, steps=steps, seconds=seconds)
