"""Arguments that the commands which use a model share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

Run = Annotated[
    Path, tyro.conf.arg(help="A run folder (its newest checkpoint), a checkpoint, or a folder of imported weights.")
]
Device = Annotated[Literal["auto", "cpu", "cuda"], tyro.conf.arg(help="Where to compute.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    tyro.conf.arg(
        help="Of weights and arithmetic; auto is bfloat16 on a GPU if the model was trained so, else float32."
    ),
]
Plot = Annotated[Path | None, tyro.conf.arg(help="Draw it into this SVG file.")]


# ------------------------------------------------------------------------------------------------
# `tercet generate`. Nothing heavy is imported here.


def generate(
    run: Run,
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
    prompt_file: Path | None = None,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
    seed: int = 0,
    context: int | None = None,
    prefill_chunk: int = 8192,
    cache: bool = True,
    graph: bool = True,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: bool = False,
) -> int:
    """Write on from a prompt. The text comes as it is made; time and tokens/s stand on stderr.

    Args:
        prompt: Text to go on from; give it several times for a batch.
        prompt_file: A file that holds the prompt; - reads standard input.
        max_new_tokens: Most tokens to write.
        temperature: 0 takes the likeliest token each time; 1 draws as the model says.
        top_k: Draw from the k likeliest tokens only; 0 from all.
        top_p: Draw from the likeliest tokens that together have this probability.
        repetition_penalty: Above 1: tokens that stand there already become less likely.
        stop: Text that ends the answer; give it several times for several.
        seed: Of the draws.
        context: Most tokens of prompt and answer; the length of training unless given.
        prefill_chunk: Prompt tokens read at once; fewer need less memory.
        cache: Keep keys and values; without it everything is read again for each token.
        graph: On a GPU, one CUDA graph for each step.
        json: One line of JSON per prompt instead of text.
    """
    prompts = [*prompt, *([] if prompt_file is None else [_read(prompt_file)])]
    from tercet.inference.generate import Timing, generate, stream
    from tercet.inference.load import load_model

    model = load_model(run, device=device, dtype=dtype)
    timing = Timing()
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
        "repetition_penalty": repetition_penalty, "stop": stop, "seed": seed, "context": context,
        "prefill_chunk": prefill_chunk, "cache": cache, "graph": graph, "timing": timing,
    }  # fmt: skip
    if json:
        _print_json(generate(model, prompts, **options))
    elif len(prompts) == 1:
        pieces = stream(model, prompts, **options)  # what is wrong is refused here, before anything is printed
        print(prompts[0], end="", flush=True)
        for piece in pieces:
            print(piece.text, end="", flush=True)
        print()
    else:
        made = generate(model, prompts, **options)
        assert isinstance(made, list)
        for i, (given, answer) in enumerate(zip(prompts, made, strict=True)):
            print(f"--- {i} ({answer.finished})\n{given}{answer.text}")
    keys = "" if timing.keys_read is None else f"; the last step read {timing.keys_read:,} keys"
    print(
        f"{timing.prompt_tokens:,} prompt tokens in {timing.prefill_seconds:.2f} s, then "
        f"{timing.tokens_per_second:,.1f} tokens/s on {model.device}, {str(model.dtype).removeprefix('torch.')}{keys}",
        file=sys.stderr,
    )
    return 0


def _print_json(made: object) -> None:
    import json

    assert isinstance(made, list)
    for answer in made:
        record = {"prompt": answer.prompt, "tokens": answer.tokens, "text": answer.text, "finished": answer.finished}
        print(json.dumps({**record, "timing": answer.timing.as_dict()}))


def _read(path: Path) -> str:
    from tercet.errors import UsageError

    if str(path) == "-":
        return sys.stdin.read()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--prompt-file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt-file {path} is not UTF-8 text (byte {error.start}): convert it") from None
