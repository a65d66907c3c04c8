"""Tokens into text as they come: whole characters only, and nothing that may yet turn out to be a stop string."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tercet.data.tokenizers import Tokenizer
from tercet.errors import TercetError
from tercet.inference.decoder import PREFILL_CHUNK, CachedDecoder, Decoder, PlainDecoder
from tercet.inference.prompts import PromptError, Prompts, as_tokens, check_room, is_single
from tercet.model.sampling import NOTHING, Sampling, choose, uniforms
from tercet.model.transformer import Transformer

# A character is at most four bytes: what is still unreadable after so many tokens is no character to wait for.
_PATIENCE = 4
_UNREADABLE = "\ufffd"


class TextStream:
    """`push` gives the text that a token makes certain; `end` the rest. `stopped` says that a stop string came."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(s for s in stop if s)
        self._tokens: list[int] = []
        # Text of a few tokens depends on the token before them (spaces of word pieces): decoding begins one earlier.
        self._from, self._told = 0, 0
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        self._tokens.append(token)
        known = self._tokenizer.decode(self._tokens[self._from : self._told])
        text = self._tokenizer.decode(self._tokens[self._from :])
        if text.endswith(_UNREADABLE) and len(self._tokens) - self._told < _PATIENCE:
            return ""
        self._from, self._told = self._told, len(self._tokens)
        return self._release(text[len(known) :])

    def end(self) -> str:
        """What was held back and will not go on."""
        if self.stopped:
            return ""
        known = self._tokenizer.decode(self._tokens[self._from : self._told])
        rest = self._tokenizer.decode(self._tokens[self._from :])[len(known) :]
        text = self._release(rest) + ("" if self.stopped else self._held)
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        text = self._held + text
        found = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


# ------------------------------------------------------------------------------------------------
# Text from a model: prompts in, tokens out, one at a time or all at once.

# Steps that a GPU may be ahead of the tokens that were handed out.
AHEAD = 2


@dataclass(frozen=True)
class Piece:
    """One step of one row: a token, and the text that it made certain (often none, or that of several tokens)."""

    row: int
    token: int | None  # None in a row's last piece if it ends without a new token
    text: str
    finished: str | None = None  # "eos", "stop" or "length" in a row's last piece


@dataclass
class Timing:
    """How long generation took, filled in while it runs."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    new_tokens: int = 0
    decode_seconds: float = 0.0
    keys_read: int | None = None  # in the last step, over all rows, KV heads and layers

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second of decoding, without the prefill and the token that it gives."""
        return 0.0 if self.decode_seconds == 0 else self.new_tokens / self.decode_seconds

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True)
class Generated:
    """What a model wrote after one prompt."""

    prompt: list[int]
    tokens: list[int]
    text: str
    finished: str  # "eos", "stop" or "length"
    timing: Timing = field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.text


def generate(model: Transformer, prompts: Prompts, **options: Any) -> Generated | list[Generated]:
    """What the model writes after each prompt: one Generated for one prompt, a list for a list.

    prompts: text, token numbers, or a list of either; rows may have different lengths. The options are those of
    `stream`.
    """
    timing = options.pop("timing", None) or Timing()
    rows: dict[int, dict[str, Any]] = {}
    tokenizer = options.get("tokenizer") or getattr(model, "tokenizer", None)
    given = as_tokens(prompts, tokenizer, model.config.vocab_size)
    for piece in stream(model, given, timing=timing, **options):
        row = rows.setdefault(piece.row, {"tokens": [], "text": [], "finished": "length"})
        if piece.token is not None:
            row["tokens"].append(piece.token)
        row["text"].append(piece.text)
        row["finished"] = piece.finished or row["finished"]
    made = [
        Generated(prompt, rows[i]["tokens"], "".join(rows[i]["text"]), rows[i]["finished"], timing)
        for i, prompt in enumerate(given)
    ]
    return made[0] if is_single(prompts) else made


def stream(
    model: Transformer,
    prompts: Prompts,
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
    context: int | None = None,
    eos_id: int | None = None,
    cache: bool = True,
    prefill_chunk: int = PREFILL_CHUNK,
    graph: bool = True,
    timing: Timing | None = None,
) -> Iterator[Piece]:
    """Pieces as they come, of all rows in turn. What cannot be is refused at once, before the first is asked for.

    temperature, top_k, top_p, repetition_penalty  how tokens are drawn; temperature 0 is greedy
    stop           texts that end a row; what is given ends before them
    seed           row r draws as row 0 of seed + r: the rest of the batch changes nothing
    tokenizer      the model's own unless given; a model without one gives tokens and no text
    context        most tokens of prompt and answer; the length of its training unless given
    eos_id         the token that ends a row; the tokenizer's unless given
    cache          keep keys and values (or read everything again for each token, to compare)
    prefill_chunk  prompt tokens read at once: longer prompts are read in parts
    graph          on a GPU, capture the step as a CUDA graph; without it every kernel is launched one by one
    timing         filled in while it runs
    """
    try:
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty)
    except ValueError as error:
        raise PromptError(str(error)) from None
    if prefill_chunk < 1:
        raise PromptError(f"prefill_chunk={prefill_chunk} must be at least 1")
    if context is not None and context < 1:
        raise PromptError(f"context={context} must be at least 1")
    tokenizer = tokenizer or getattr(model, "tokenizer", None)
    if stop and tokenizer is None:
        raise PromptError("stop is text, and there is no tokenizer: give tokenizer=…")
    rows = as_tokens(prompts, tokenizer, model.config.vocab_size)
    room = check_room(rows, max_new_tokens, context or getattr(model, "context", None))
    end = eos_id if eos_id is not None else tokenizer.eos_id if tokenizer is not None else None
    # Rows of the embedding that no token has are never trained, and must not be drawn.
    vocabulary = model.config.vocab_size if tokenizer is None else min(tokenizer.vocab_size, model.config.vocab_size)
    texts = [None if tokenizer is None else TextStream(tokenizer, stop) for _ in rows]
    device = model.embedding.weight.device

    def pieces() -> Iterator[Piece]:
        was_training = model.training
        model.eval()
        try:
            decoder: Decoder = PlainDecoder(model)
            if cache:
                decoder = CachedDecoder(model, len(rows), room, chunk=prefill_chunk, graph=graph)
            run = _Run(decoder, sampling, rows, seed, max_new_tokens, vocabulary, end, device, timing or Timing())
            yield from _pieces(run, texts)
        finally:
            model.train(was_training)

    return pieces()


class _Run:
    """The tensors of one generation: logits to tokens to logits.

    Where steps ask nothing of the host the next ones are under way while a token is handed out: which rows have ended
    is told on the device, by the end token at once, by stop strings a step or two late. What such a row still wrote is
    not looked at.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampling: Sampling,
        rows: list[list[int]],
        seed: int,
        steps: int,
        vocabulary: int,
        end: int | None,
        device: torch.device,
        timing: Timing,
    ) -> None:
        self.decoder, self.sampling, self.rows, self.end = decoder, sampling, rows, end
        self.steps, self.vocabulary, self.timing = steps, vocabulary, timing
        self._uniform: Tensor | None = None
        if sampling.temperature > 0:
            self._uniform = uniforms(seed, len(rows), steps).to(device)
        self.active = [True] * len(rows)
        self._going = torch.ones(len(rows), dtype=torch.int32, device=device)
        self._ahead = AHEAD if decoder.runs_ahead else 0
        self._tokens: Tensor | None = None
        self._seen: Tensor | None = None
        self._told: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._begun, self._returned = 0, 0.0
        if steps > 1:
            decoder.prepare()

    def end_row(self, row: int) -> None:
        """This row writes no more."""
        self.active[row] = False
        self._going[row] = 0

    def next_tokens(self, step: int) -> list[int]:
        """The next token of each row; those of rows that have ended mean nothing."""
        began = self._returned if step > 0 and self._ahead else time.perf_counter()
        while self._begun < min(self.steps, step + 1 + (self._ahead if step > 0 else 0)):
            self._begin(self._begun)
            self._begun += 1
        chosen, copied = self._told.popleft()
        if copied is not None:
            copied.synchronize()
        tokens = chosen.tolist()
        self._returned = time.perf_counter()
        if step == 0:
            self.timing.prompt_tokens = sum(map(len, self.rows))
            self.timing.prefill_seconds = self._returned - began
        else:
            self.timing.decode_seconds += self._returned - began
            self.timing.new_tokens += sum(self.active)
        if any(token == NOTHING and more for token, more in zip(tokens, self.active, strict=True)):
            raise TercetError(
                f"the model's logits at new token {step} are not finite: its weights are damaged, or its training "
                "diverged; load an earlier checkpoint, or use float32"
            )
        return tokens

    def keys_read(self) -> int | None:
        """In the last step; None if that was one which nobody waited for."""
        return None if self._told else self.decoder.keys_read()

    @torch.no_grad()
    def _begin(self, step: int) -> None:
        """From logits to a token that is on its way to the host."""
        logits = self.decoder.prefill(self.rows) if self._tokens is None else self._step()
        if step == 0 and self.sampling.repetition_penalty != 1:
            self._seen = torch.zeros_like(logits[:, : self.vocabulary], dtype=torch.bool)
            for i, row in enumerate(self.rows):
                self._seen[i, torch.tensor(row, device=logits.device)] = True
        uniform = None if self._uniform is None else self._uniform[:, step]
        chosen = choose(logits[:, : self.vocabulary], self.sampling, uniform, self._seen)
        if self._seen is not None:
            self._seen.scatter_(1, chosen.clamp(min=0)[:, None], True)
        self._tokens = chosen.clamp(min=0)
        if self.end is not None:
            self._going *= chosen != self.end
        copied = None
        if chosen.is_cuda:
            pinned = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
            chosen = pinned.copy_(chosen, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._told.append((chosen, copied))

    def _step(self) -> Tensor:
        assert self._tokens is not None
        return self.decoder.step(self._tokens, self._going)


def _pieces(run: _Run, texts: list[TextStream | None]) -> Iterator[Piece]:
    for step in range(run.steps):
        tokens = run.next_tokens(step)
        for row, (token, text) in enumerate(zip(tokens, texts, strict=True)):
            if not run.active[row]:
                continue
            if token == run.end:
                run.end_row(row)
                yield Piece(row, None, text.end() if text else "", "eos")
                continue
            said = text.push(token) if text else ""
            finished = "stop" if text and text.stopped else "length" if step == run.steps - 1 else None
            if finished:
                run.end_row(row)
                said += text.end() if text else ""
                if text and text.stopped:  # the end of the text completed a stop string
                    finished = "stop"
            yield Piece(row, token, said, finished)
        if not any(run.active):
            break
    run.timing.keys_read = run.keys_read()
