"""The commands `tercet generate` and `tercet calibrate`. Imports nothing heavy before their arguments are checked."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tercet import hints
from tercet.atomic_io import check_writable
from tercet.config.flags import Arg
from tercet.errors import TercetError, UsageError
from tercet.inference.arguments import (
    Device,
    Dtype,
    Run,
    at_least_one,
    check_model,
    find_model,
    read_prompt_file,
    required_context,
    stored_tokenizer,
    tokenize_prompts,
)
from tercet.terminal import Progress, plural, printable

if TYPE_CHECKING:
    from tercet.inference.generate import Generated, Timing
    from tercet.inference.load import LanguageModel


def generate(
    run: Run,
    prompt: Annotated[tuple[str, ...], Arg(repeat=True)] = (),
    prompt_file: Path | None = None,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    stop: Annotated[tuple[str, ...], Arg(repeat=True)] = (),
    chat: bool = False,
    system: str = "",
    seed: int = 0,
    context: int | None = None,
    prefill_chunk: int = 8192,
    graph: bool = True,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: bool = False,
) -> int:
    """Generate text from --prompt, a file or stdin. Text is streamed to stdout; timing and tokens/s go to stderr.

    Without a prompt, on a terminal, each line you type is a prompt, until Ctrl-D.

    Args:
        prompt: Text to continue; repeat the flag for a batch. Without it, the prompt is read from standard input.
        prompt_file: File with the prompt; - reads standard input.
        max_new_tokens: Maximum number of tokens to generate.
        temperature: 0 is greedy; 1 samples from the model's distribution.
        top_k: Sample from the k most likely tokens; 0 uses all.
        top_p: Sample from the smallest set of tokens with this total probability.
        repetition_penalty: Above 1, tokens that already occurred become less likely.
        stop: Text that ends the answer; repeat the flag for several.
        chat: Put each prompt into the tokenizer's chat template, as a message of the user, and print the answer only.
        system: With --chat: the system message.
        seed: Random seed of the sampling.
        context: Maximum tokens of prompt and answer; default: the training sequence length.
        prefill_chunk: Prompt tokens read at once; fewer need less memory.
        graph: On a GPU, capture the decode step as a CUDA graph.
        json: Print one line of JSON per prompt instead of text.
    """
    from tercet.model.config import Sampling

    prompts = [*prompt, *([] if prompt_file is None else [read_prompt_file(prompt_file)])]
    check_model(run)
    at_least_one(max_new_tokens=max_new_tokens, context=context, prefill_chunk=prefill_chunk)
    if "" in stop:
        raise UsageError("--stop '' is empty: give the text that ends the answer, or leave it out")
    try:
        Sampling(temperature, top_k, top_p, repetition_penalty)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if system and not chat:
        raise UsageError("--system is used with --chat only: add --chat, or drop it")
    opening = [{"role": "system", "content": system}] if system else []
    interactive = not prompts and sys.stdin is not None and sys.stdin.isatty()
    if not prompts and not interactive:
        prompts = [_read_stdin()]
    for text in prompts:
        if not text:
            raise UsageError("the prompt is empty: give some text with --prompt TEXT, --prompt-file FILE or on stdin")
    stored = find_model(run, verify=True)
    tokenizer = stored_tokenizer(stored.run, stored.source)
    if chat and tokenizer.chat is None:
        tokenize_prompts([[*opening, _message("user", "")]], tokenizer, 1)  # says what is missing
    asked: list[Any] = []
    if prompts:
        asked = [[*opening, _message("user", text)] for text in prompts] if chat else prompts
        rows = tokenize_prompts(asked, tokenizer, stored.run.model.vocab_size)
        required_context(rows, max_new_tokens, context or stored.context)
    from tercet.inference.load import load_model

    model = load_model(stored.source, device=device, dtype=dtype, verify=False)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
        "repetition_penalty": repetition_penalty, "stop": stop, "seed": seed, "context": context,
        "prefill_chunk": prefill_chunk, "graph": graph, "tokenizer": tokenizer,
    }  # fmt: skip
    if not interactive:
        _print_answers(model, asked, None if chat else prompts, json, **options)
        return 0
    messages = opening

    def answer(text: str, turn: int) -> None:
        nonlocal messages
        prompt = [*messages, _message("user", text)] if chat else text
        reply = _print_answers(model, [prompt], None if chat else [text], json, **options | {"seed": seed + turn})
        messages = [*messages, _message("user", text), _message("assistant", reply)]

    _converse(answer)
    return 0


def calibrate(
    model: Annotated[Path, Arg("A folder of a dense model of transformers, or a GGUF file.")],
    text: tuple[Path, ...] = (),
    length: int | None = None,
    facts: int = 16,
    store: bool = False,
    device: Device = "auto",
) -> int:
    """Which blocks a dense model needs to stay as good at finding facts: plants facts, measures, recommends a setting.

    Args:
        text: UTF-8 files to plant the facts in; default: Python's own documentation.
        length: Tokens of each text; default: 8192 on a GPU, 4096 on a CPU, but at most the model's context.
        facts: Texts to read, with one fact each.
        store: Write the recommended setting to the model's config.json, for attn_implementation="tercet"; needs 8 facts
            in texts of 2048 tokens or more.
    """
    at_least_one(length=length, facts=facts)
    if not model.exists():
        raise UsageError(f"{model} does not exist: give a folder of a model of transformers, or a GGUF file")
    folder = model.is_dir()
    if folder and not (model / "config.json").is_file():
        fix = hints.tercet("export", "hf", model, "OUT", "--format", "llama")
        raise UsageError(f"{model} has no config.json, so it is not a model of transformers: export a run with `{fix}`")
    if store and not folder:
        raise UsageError(f"--store needs a folder, but {model} is a file: load it in transformers and save it first")
    if store:
        check_writable("--store", model / "config.json")
    documents = [read_prompt_file(file, "--text") for file in text] or None
    print(f"calibrating {model} on {plural(facts, 'planted fact')}", file=sys.stderr, flush=True)
    from tercet.inference.calibrate import fact_table, load_dense, store_settings

    dense, tokenizer = load_dense(model, device)
    longest = getattr(dense.config, "max_position_embeddings", None) or 8192
    length = length or min(longest, 4096 if dense.device.type == "cpu" else 8192)
    if store and (length < 2048 or facts < 8):
        raise UsageError(
            f"--store needs texts of at least 2048 tokens, for 16 blocks of 64, and 8 facts: not {length} and {facts}"
        )
    progress = Progress(facts * length)
    table = fact_table(dense, tokenizer, documents, length=length, facts=facts, progress=progress.update)
    print(table)
    if 2 * table.answered < facts:
        print(f"warning: only {table.answered} of {facts} facts are answered: use a shorter --length", file=sys.stderr)
    if store:
        store_settings(model, table.stored(table.recommended))
    print(
        f'stored in {model / "config.json"}, for attn_implementation="tercet"'
        if store
        else "--store keeps this setting"
    )
    return 0


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _read_stdin() -> str:
    text = ""
    if sys.stdin is not None:
        with contextlib.suppress(OSError):  # a closed one
            text = read_prompt_file(Path("-"))
    if not text:
        raise UsageError("no prompt given: use --prompt TEXT, --prompt-file FILE, or pipe text into the command")
    return text.removesuffix("\n")  # echo adds it


def _converse(answer: Callable[[str, int], None]) -> None:
    """Read prompts line by line and answer each, until the end of the input or Ctrl-C."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history in `input`)
    print("Each line is a prompt; Ctrl-D ends. (Or pass one with --prompt TEXT.)", file=sys.stderr)
    turn = 0
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if not text:
            continue
        try:
            answer(text, turn)
        except TercetError as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)
        except KeyboardInterrupt:  # ends this answer only
            print()
        turn += 1


def _print_answers(
    model: LanguageModel, prompts: list[Any], texts: list[str] | None, json: bool, **options: Any
) -> str:
    """Print the answers, each after its text if there are texts. Returns the first answer."""
    from tercet.inference.generate import Timing, generate, stream

    timing = options["timing"] = Timing()
    shown = printable if sys.stdout.isatty() else str  # a file or a pipe gets the text as it is
    if len(prompts) == 1 and not json:
        pieces = stream(model, prompts, **options)  # raises on invalid options, before anything is printed
        first = ""
        print(shown(texts[0]) if texts else "", end="", flush=True)
        for piece in pieces:
            print(shown(piece.text), end="", flush=True)
            first += piece.text
        print()
    else:
        answers = generate(model, prompts, **options)
        assert isinstance(answers, list)
        first = answers[0].text
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            if json:
                print(_json_line(prompt, answer))
            else:
                print(f"--- {i} ({answer.finished})\n{shown((texts[i] if texts else '') + answer.text)}")
    print(
        f"{plural(timing.prompt_tokens, 'prompt token')} in {timing.prefill_seconds:.2f} s, then "
        f"{timing.tokens_per_second:,.1f} tokens/s on {model.device}, {str(model.dtype).removeprefix('torch.')}"
        f"{f', checkpoint of step {model.step:,}' if model.step else ''}"
        f"{_keys_read(model, timing, len(prompts))}",
        file=sys.stderr,
    )
    return first


def _keys_read(model: LanguageModel, timing: Timing, rows: int) -> str:
    """Keys per layer and KV head that the last step read, compared with dense attention.

    Empty for a context so short that the three branches together read as many, some of them more than once.
    """
    config = model.config
    if timing.keys_read is None or rows > 1 or set(config.attention_kinds) == {"dense"}:
        return ""
    read = timing.keys_read / (config.layers * config.kv_heads)
    dense = timing.prompt_tokens + timing.new_tokens
    if read >= dense:
        return ""
    return f"; the last step read {read:,.0f} keys per layer and KV head, dense attention reads {dense:,}"


def _json_line(prompt: Any, answer: Generated) -> str:
    record = {"prompt": prompt, "text": answer.text, "prompt_tokens": answer.prompt, "tokens": answer.tokens}
    return dumps({**record, "finished": answer.finished, "timing": answer.timing.as_dict()})
