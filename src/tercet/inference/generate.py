"""Text generation: prompts in, tokens and text out, streamed or all at once.

`stream` yields pieces as they are generated, `generate` collects them. `Detokenizer` turns tokens into text.
"""

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
from tercet.inference.arguments import (
    PromptError,
    Prompts,
    at_least_one,
    end_tokens,
    is_single,
    required_context,
    tokenize_prompts,
)
from tercet.inference.decoder import PREFILL_CHUNK, CachedDecoder
from tercet.model.config import Sampling
from tercet.model.sampling import INVALID_TOKEN, sample_token, uniform_draws
from tercet.model.transformer import Transformer

# Steps launched on the GPU ahead of the tokens already returned.
LOOKAHEAD = 2


@dataclass(frozen=True)
class Piece:
    """One step of one row: a token, and the text completed by it, which may be empty or span several tokens."""

    row: int
    token: int | None  # None in the last piece of a row that ends without a new token
    text: str
    finished: str | None = None  # "eos", "stop" or "length" in the last piece of a row


@dataclass
class Timing:
    """Timing of a generation, filled in while it runs."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    new_tokens: int = 0
    decode_seconds: float = 0.0
    keys_read: int | None = None  # in the last step, over all rows, KV heads and layers

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second of decoding; prefill and the token it produces are excluded."""
        return 0.0 if self.decode_seconds == 0 else self.new_tokens / self.decode_seconds

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True)
class Generated:
    """The text generated for one prompt."""

    prompt: list[int]
    tokens: list[int]
    text: str
    finished: str  # "eos", "stop" or "length"
    timing: Timing = field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.text


def generate(model: Transformer, prompts: Prompts, **options: Any) -> Generated | list[Generated]:
    """Generate text for one prompt (returns one Generated) or a batch of prompts (returns a list).

    prompts: text, token IDs, a conversation ([{"role": "user", "content": ...}, ...], rendered through the tokenizer's
    chat template), or a list of one of these; lengths may differ. See `stream` for the options.
    """
    timing = options.pop("timing", None) or Timing()
    tokenizer = options.get("tokenizer") or getattr(model, "tokenizer", None)
    tokens = tokenize_prompts(prompts, tokenizer, model.config.vocab_size)
    if options.get("eos_id") is None:
        options["eos_id"] = end_tokens(prompts, tokenizer)
    rows: list[list[Piece]] = [[] for _ in tokens]
    for piece in stream(model, tokens, timing=timing, **options):
        rows[piece.row].append(piece)
    results = []
    for prompt, pieces in zip(tokens, rows, strict=True):
        new = [piece.token for piece in pieces if piece.token is not None]
        finished = pieces[-1].finished
        assert finished is not None
        results.append(Generated(prompt, new, "".join(piece.text for piece in pieces), finished, timing))
    return results[0] if is_single(prompts) else results


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
    eos_id: int | Sequence[int] | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    graph: bool = True,
    timing: Timing | None = None,
) -> Iterator[Piece]:
    """Yield pieces of all rows as they are generated. Invalid arguments raise at once, not at the first piece.

    temperature, top_k, top_p, repetition_penalty  sampling; temperature 0 is greedy
    stop           strings that end a row; they are not part of the text
    seed           row r of a batch samples like a single prompt with seed + r, whatever the other rows are
    tokenizer      default: the model's; without one, pieces have tokens but no text
    context        maximum tokens of prompt and answer; default: the training sequence length
    eos_id         tokens that end a row; default: the tokenizer's, and what ends a turn of a conversation
    prefill_chunk  prompt tokens read at once
    graph          on a GPU, capture the decode step as a CUDA graph
    timing         filled in while it runs
    """
    try:
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty)
    except ValueError as error:
        raise PromptError(str(error)) from None
    at_least_one(max_new_tokens=max_new_tokens, prefill_chunk=prefill_chunk, context=context)
    tokenizer = tokenizer or getattr(model, "tokenizer", None)
    if stop and tokenizer is None:
        raise PromptError("stop needs a tokenizer, but there is none: give tokenizer=…")
    rows = tokenize_prompts(prompts, tokenizer, model.config.vocab_size)
    max_len = required_context(rows, max_new_tokens, context or getattr(model, "context", None))
    if eos_id is None:
        eos_id = end_tokens(prompts, tokenizer)
    ends = (eos_id,) if isinstance(eos_id, int) else tuple(eos_id)
    # A padded vocabulary has untrained embedding rows that must never be sampled.
    vocabulary = model.config.vocab_size if tokenizer is None else min(tokenizer.vocab_size, model.config.vocab_size)
    texts = [None if tokenizer is None else Detokenizer(tokenizer, stop, row) for row in rows]

    def pieces() -> Iterator[Piece]:
        was_training = model.training
        model.eval()
        try:
            decoder = CachedDecoder(model, len(rows), max_len, chunk=prefill_chunk, graph=graph)
            loop = _DecodeLoop(decoder, sampling, rows, seed, max_new_tokens, vocabulary, ends, timing or Timing())
            yield from _pieces(loop, texts)
        finally:
            model.train(was_training)

    return pieces()


class _DecodeLoop:
    """Alternates between decoder and sampler.

    With an asynchronous decoder, the next steps are already running when a token is returned. Rows end on the device:
    at once for the end token, a step or two late for stop strings. Tokens of ended rows are ignored.
    """

    def __init__(
        self, decoder: CachedDecoder, sampling: Sampling, rows: list[list[int]], seed: int, steps: int,
        vocabulary: int, ends: tuple[int, ...], timing: Timing,
    ) -> None:  # fmt: skip
        self.decoder, self.sampling, self.rows, self.ends = decoder, sampling, rows, ends
        self.steps, self.vocabulary, self.timing = steps, vocabulary, timing
        device = decoder.model.embedding.weight.device
        self._uniform: Tensor | None = None
        if sampling.temperature > 0:
            self._uniform = uniform_draws(seed, len(rows), steps).to(device)
        self.active = [True] * len(rows)
        self._device_active = torch.ones(len(rows), dtype=torch.int32, device=device)
        self._lookahead = LOOKAHEAD if decoder.asynchronous else 0
        self._tokens: Tensor | None = None
        self._seen: Tensor | None = None  # bool [B, V], for the repetition penalty
        self._pending: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()  # tokens on their way to the host
        self._launched, self._returned = 0, 0.0
        if steps > 1:
            decoder.prepare()

    def end_row(self, row: int) -> None:
        self.active[row] = False
        self._device_active[row] = 0

    def next_tokens(self, step: int) -> list[int]:
        """The next token of each row; undefined for ended rows."""
        began = self._returned if step > 0 and self._lookahead else time.perf_counter()
        while self._launched < min(self.steps, step + 1 + (self._lookahead if step > 0 else 0)):
            self._launch(self._launched)
            self._launched += 1
        chosen, copied = self._pending.popleft()
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
        if any(token == INVALID_TOKEN and active for token, active in zip(tokens, self.active, strict=True)):
            raise TercetError(
                f"the model's logits at new token {step} are not finite: its weights are damaged, or its training "
                "diverged; load an earlier checkpoint, or use float32"
            )
        return tokens

    def keys_read(self) -> int | None:
        """Keys read in the last step; None if steps beyond the returned tokens were launched."""
        return None if self._pending else self.decoder.keys_read()

    @torch.no_grad()
    def _launch(self, step: int) -> None:
        """Decode, sample, and start copying the tokens to the host."""
        if self._tokens is None:
            logits = self.decoder.prefill(self.rows)
        else:
            logits = self.decoder.step(self._tokens, self._device_active)
        if step == 0 and self.sampling.repetition_penalty != 1:
            self._seen = torch.zeros_like(logits[:, : self.vocabulary], dtype=torch.bool)
            for i, row in enumerate(self.rows):
                known = [token for token in row if token < self.vocabulary]  # a prompt may use padding rows
                self._seen[i, torch.tensor(known, dtype=torch.long, device=logits.device)] = True
        uniform = None if self._uniform is None else self._uniform[:, step]
        chosen = sample_token(logits[:, : self.vocabulary], self.sampling, uniform, self._seen)
        if self._seen is not None:
            self._seen.scatter_(1, chosen.clamp(min=0)[:, None], True)
        self._tokens = chosen.clamp(min=0)
        for end in self.ends:
            self._device_active *= chosen != end
        copied = None
        if chosen.is_cuda:
            pinned = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
            chosen = pinned.copy_(chosen, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._pending.append((chosen, copied))


def _pieces(loop: _DecodeLoop, texts: list[Detokenizer | None]) -> Iterator[Piece]:
    for step in range(loop.steps):
        tokens = loop.next_tokens(step)
        for row, (token, text) in enumerate(zip(tokens, texts, strict=True)):
            if not loop.active[row]:
                continue
            if token in loop.ends:
                loop.end_row(row)
                yield Piece(row, None, text.end() if text else "", "eos")
                continue
            new_text = text.push(token) if text else ""
            finished = "stop" if text and text.stopped else "length" if step == loop.steps - 1 else None
            if finished:
                loop.end_row(row)
                new_text += text.end() if text else ""
                if text and text.stopped:  # the remaining text completed a stop string
                    finished = "stop"
            yield Piece(row, token, new_text, finished)
        if not any(loop.active):
            break
    loop.timing.keys_read = loop.keys_read()


# A UTF-8 character has at most four bytes, so at most three undecodable ones can become one with the next token.
_MAX_PENDING_TOKENS = 4
_UNDECODABLE = "\ufffd"


class Detokenizer:
    """Turns tokens into text. Holds back incomplete characters and anything that may be the start of a stop string.

    prompt: the tokens before. Some tokenizers drop the space before a word if nothing precedes it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(s for s in stop if s)
        before = list(prompt[-_MAX_PENDING_TOKENS:])
        self._tokens = [] if tokenizer.decode(before).endswith(_UNDECODABLE) else before
        # The text of word pieces depends on the token before them, so decoding starts one emitted chunk earlier.
        self._start, self._emitted = 0, len(self._tokens)
        self._shown = len(self._decode())  # characters of the text since _start that were released
        self._held = ""
        self.stopped = False  # a stop string was found

    def push(self, token: int) -> str:
        """The text completed by this token."""
        self._tokens.append(token)
        text = self._decode()
        # the last bytes may become a character with the next token
        pending = min(_MAX_PENDING_TOKENS - 1, len(text) - len(text.rstrip(_UNDECODABLE)))
        end = max(self._shown, len(text) - pending)
        new, self._shown = text[self._shown : end], end
        if not pending:
            self._start, self._emitted = self._emitted, len(self._tokens)
            self._shown = len(self._decode())
        return self._release(new)

    def end(self) -> str:
        """The text still held back."""
        if self.stopped:
            return ""
        text = self._release(self._decode()[self._shown :]) + ("" if self.stopped else self._held)
        self._held = ""
        return text

    def _decode(self) -> str:
        return self._tokenizer.decode(self._tokens[self._start :])

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
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
