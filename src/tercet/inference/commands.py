"""`tercet generate`, and the arguments it shares with `tercet eval`. Imports nothing heavy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

Run = Annotated[
    Path, tyro.conf.arg(help="A run folder (its newest checkpoint), a checkpoint, or a folder of imported weights.")
]
Device = Annotated[Literal["auto", "cpu", "cuda"], tyro.conf.arg(help="Device to run on.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    tyro.conf.arg(
        help="Weights and arithmetic; auto: bfloat16 on a GPU if the model was trained in bfloat16, else float32."
    ),
]
Plot = Annotated[Path | None, tyro.conf.arg(help="Write a plot to this SVG file.")]


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
    """Generate text from a prompt. Text is streamed to stdout; timing and tokens/s go to stderr.

    Args:
        prompt: Text to continue; repeat the flag for a batch.
        prompt_file: File with the prompt; - reads standard input.
        max_new_tokens: Maximum number of tokens to generate.
        temperature: 0 is greedy; 1 samples from the model's distribution.
        top_k: Sample from the k most likely tokens; 0 uses all.
        top_p: Sample from the smallest set of tokens with this total probability.
        repetition_penalty: Above 1, tokens that already occurred become less likely.
        stop: Text that ends the answer; repeat the flag for several.
        seed: Random seed of the sampling.
        context: Maximum tokens of prompt and answer; default: the training sequence length.
        prefill_chunk: Prompt tokens read at once; fewer need less memory.
        cache: Use a KV cache; without it, everything is recomputed for each token.
        graph: On a GPU, capture the decode step as a CUDA graph.
        json: Print one line of JSON per prompt instead of text.
    """
    prompts = [*prompt, *([] if prompt_file is None else [read_prompt_file(prompt_file)])]
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
        pieces = stream(model, prompts, **options)  # raises on invalid options, before anything is printed
        print(prompts[0], end="", flush=True)
        for piece in pieces:
            print(piece.text, end="", flush=True)
        print()
    else:
        answers = generate(model, prompts, **options)
        assert isinstance(answers, list)
        for i, (text, answer) in enumerate(zip(prompts, answers, strict=True)):
            print(f"--- {i} ({answer.finished})\n{text}{answer.text}")
    keys = "" if timing.keys_read is None else f"; the last step read {timing.keys_read:,} keys"
    print(
        f"{timing.prompt_tokens:,} prompt tokens in {timing.prefill_seconds:.2f} s, then "
        f"{timing.tokens_per_second:,.1f} tokens/s on {model.device}, {str(model.dtype).removeprefix('torch.')}{keys}",
        file=sys.stderr,
    )
    return 0


def _print_json(answers: object) -> None:
    import json

    assert isinstance(answers, list)
    for answer in answers:
        record = {"prompt": answer.prompt, "tokens": answer.tokens, "text": answer.text, "finished": answer.finished}
        print(json.dumps({**record, "timing": answer.timing.as_dict()}))


def read_prompt_file(path: Path) -> str:
    from tercet.errors import UsageError

    if str(path) == "-":
        return sys.stdin.read()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--prompt-file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt-file {path} is not UTF-8 text (byte {error.start}): convert it") from None
