"""`tercet bench …`: what can be measured, each with its options. Torch is imported when a bench begins."""

from __future__ import annotations


def attention(
    *,
    shapes: str = "P8k,P64k,C8x2k,C4x4k,C1x16k",
    inputs: str = "random,smooth",
    correlation: float = 0.996,
    dense: str = "cudnn,flash",
    dense_limit: int = 65536,
    rows: int = 24,
    budget: float = 0.6,
    profile: bool = False,
    graph: bool = True,
    dense_once: bool = False,
) -> int:
    """The operator beside dense attention, in one process on this machine's GPU: correctness first, then times.

    Args:
        shapes: Comma-separated: P8k … P64k (64 heads of 128), C8x2k … C1x1024k (12 heads of 64; C32x2k … C2x32k
            and C1x64k have a step's 65,536 tokens), M4x4k, M1x16k.
        inputs: random, smooth or both; smooth has the block agreement of text.
        correlation: Of successive queries in smooth inputs.
        dense: Dense attention to compare with: cudnn, flash or both.
        dense_limit: No dense attention beyond this length.
        rows: Rows checked in fp64 at full length.
        budget: Seconds for each median.
        profile: Also print the time of every kernel.
        graph: At head 64 also time CUDA graphs.
        dense_once: Time dense attention beside a shape's first kind of inputs only.
    """
    from tercet.bench.attention import main

    arguments = ["--shapes", shapes, "--inputs", inputs, "--correlation", str(correlation), "--dense", dense]
    arguments += ["--dense-limit", str(dense_limit), "--rows", str(rows), "--budget", str(budget)]
    arguments += ["--graph" if graph else "--no-graph"]
    arguments += ["--dense-once"] if dense_once else []
    return main(arguments + (["--profile"] if profile else []))


def layer(
    *, lengths: str = "2048,4096,8192,16384", tokens: int = 16384, compile: bool = False, repeats: int = 10
) -> int:
    """The whole layer, projections, positions, φ and gates included, beside its dense twin, forward + backward.

    Args:
        lengths: Sequence lengths, comma-separated.
        tokens: Tokens in all; the batch is this over the length.
        compile: Through torch.compile.
        repeats: How often each is timed; the median counts.
    """
    from tercet.bench.layer import main

    return main(_numbers("--lengths", lengths), tokens, compile, repeats)


def tune(*, shapes: str = "P64k,C1x16k", kernels: str | None = None, workers: int = 8) -> int:
    """Search launch parameters for this GPU and print rows for the table that ships with the package.

    Args:
        shapes: As for `tercet bench attention`.
        kernels: Comma-separated names; all of them unless given.
        workers: Processes that compile ahead of timing.
    """
    from tercet.bench.tune import main

    chosen = [] if kernels is None else ["--kernels", kernels]
    return main(["--shapes", shapes, "--workers", str(workers), *chosen])


def decode(
    *,
    batches: str = "1,16",
    contexts: str = "2048,16384,65536,262144",
    heads: str = "P",
    attention: bool = True,
    preset: str = "m7c",
    model_batches: str = "1,16",
    model_contexts: str = "2048,8192,32768,65536,262144",
    steps: int = 64,
    profile: bool = False,
) -> int:
    """Decoding beside dense attention: a whole model's first token and tokens/s; on a GPU also the attention step.

    Args:
        batches: Rows that decode together in the attention step, comma-separated.
        contexts: Tokens in their caches.
        heads: P (64 query heads, 4 KV heads, head 128) or C (12, 2, 64).
        attention: Measure the attention step.
        preset: The model, NSA and its dense twin.
        model_batches: Rows that the whole model writes together.
        model_contexts: Tokens of its prompts; empty for no whole model.
        steps: Tokens that it writes while it is timed.
        profile: Also print the time of every kernel of the attention step.
    """
    from tercet.bench.decode import HEADS, main
    from tercet.errors import UsageError

    if heads not in HEADS:
        raise UsageError(f"--heads {heads} is unknown: pick one of {', '.join(HEADS)}")
    return main(
        batches=_numbers("--batches", batches), contexts=_numbers("--contexts", contexts), heads=heads,
        attention=attention, preset=preset,
        model_batches=_numbers("--model-batches", model_batches),
        model_contexts=_numbers("--model-contexts", model_contexts), steps=steps, profile=profile,
    )  # fmt: skip


def train(
    *,
    preset: str = "m7c",
    lengths: str = "2048,4096,8192,16384,32768,65536",
    tokens: int = 65536,
    batches: str = "",
    batch_length: int = 2048,
    kinds: str = "nsa,dense",
    steps: int = 10,
    repeats: int = 3,
    checkpointing: str = "none",
    packed: str = "",
    plain: str = "",
    statistics: bool = True,
    compile: str = "auto",
    cuda_graph: str = "off",
    settings: str = "",
    device: str = "auto",
    seconds: float = 600,
    out: str | None = None,
    picture: str | None = None,
    plot: str | None = None,
) -> int:
    """Whole training steps of a model and its dense twin, over lengths and batches: correctness first, then times.

    Args:
        preset: The model; its twin is the preset of the same name with -dense.
        lengths: Sequence lengths, comma-separated, each at `tokens` a step.
        tokens: Tokens a step for those.
        batches: Also these batches, at one length.
        batch_length: That length.
        kinds: nsa, dense or both.
        steps: Steps of a log interval; the first interval compiles, and is not counted.
        repeats: Intervals that are timed; the median counts. 0: the first one, compiling included.
        checkpointing: none, selective or full activation checkpointing.
        packed: Kinds (nsa, dense or both) whose documents are packed into one row with bounds, instead of a row each.
        plain: Of the packed kinds, those measured with a row for each document as well.
        statistics: Look at gates and selection in the last step of each interval, as a run does.
        compile: auto (on a GPU), on or off.
        cuda_graph: on: forward and backward of a step as one CUDA graph; off, or auto (where it can be).
        settings: More settings of the run, as model.nsa.window=512,model.shared_kv=true.
        device: auto, cuda or cpu.
        seconds: A cell that takes longer is ended, and says so.
        out: Also write the JSON line to this file.
        picture: Draw heat maps into this file, SVG or PNG (needs matplotlib).
        plot: Measure nothing: draw the results in this file, as --out wrote it, into --picture.
    """
    from pathlib import Path

    from tercet.bench.train import PICTURES, check_place, main, read_results

    if plot is not None:
        from tercet.bench.train_plot import draw
        from tercet.errors import UsageError

        if picture is None:
            raise UsageError(f"--plot {plot} needs --picture FILE.svg to draw into")
        check_place("--picture", Path(picture), PICTURES)
        print("\n".join(draw(read_results("--plot", Path(plot)), Path(picture))))
        return 0

    return main(
        preset=preset, kinds=kinds.split(","), lengths=_numbers("--lengths", lengths), tokens=tokens,
        batches=_numbers("--batches", batches), batch_length=batch_length, steps=steps, repeats=repeats,
        checkpointing=checkpointing,
        packed=[kind for kind in packed.split(",") if kind], plain=[kind for kind in plain.split(",") if kind],
        statistics=statistics, seconds=seconds,
        flags=_settings(settings) | {"train.compile": compile, "train.cuda_graph": cuda_graph}
        | ({} if device == "auto" else {"run.device": device}),
        out=Path(out) if out else None, picture=Path(picture) if picture else None,
    )  # fmt: skip


def _settings(text: str) -> dict[str, str]:
    from tercet.errors import UsageError

    pairs = [part.strip() for part in text.split(",") if part.strip()]
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise UsageError(f"--settings {wrong[0]} is no KEY=VALUE: give them as model.nsa.window=512,train.clip=1")
    return dict(pair.split("=", 1) for pair in pairs)


def _numbers(flag: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            from tercet.config.load import ConfigError

            raise ConfigError(
                f"{flag} {text}: {part} is no whole number of at least 1: give such numbers with commas between them, "
                f"as in {flag} 1024,2048"
            )
    return [int(part) for part in parts]
