"""What generation asks of a model: read prompts, then one token per row at a time.

`Decoder` is the seam: whatever does these two things (with a cache, without, as a CUDA graph) writes the same text.
tokens: int64 [B, T]; logits: [B, V].
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tercet.model.decode import why_not
from tercet.model.transformer import Transformer

PREFILL_CHUNK = 8192


class Decoder(Protocol):
    """Holds a batch of sequences of any lengths."""

    runs_ahead: bool
    """A step asks nothing of the host: the next may begin before this one's token is known to it."""

    def prepare(self) -> None:
        """Do now what need be done but once before steps are taken."""

    def prefill(self, prompts: list[list[int]]) -> Tensor:
        """Read the prompts, and give the logits after each one's last token."""

    def step(self, tokens: Tensor, active: Tensor) -> Tensor:
        """Read one more token of each active row, and give the logits after it: until the next step, where they are.
        tokens: int64 [B]; active: int32 [B]; what comes for rows that are not active means nothing."""

    def keys_read(self) -> int | None:
        """Keys read in the last step, over all rows, KV heads and layers; None where nobody counts."""


class CachedDecoder:
    """Reads prompts in chunks, so that a prompt's activations need not fit in memory, only its cache.

    graph   capture the step as a CUDA graph where all layers decode on the kernels: a step is then one launch for the
            host, and waits for nothing. `graph_reason` says why there is none.
    """

    def __init__(
        self, model: Transformer, batch: int, max_len: int, *, chunk: int = PREFILL_CHUNK, graph: bool = True
    ) -> None:
        self.model, self.chunk, self.batch = model, chunk, batch
        self.cache = [layer.make_cache(batch, max_len) for layer in model.attention_layers()]
        self._device = model.embedding.weight.device
        reason = self._why_not_kernels()
        self.runs_ahead = reason is None
        self.graph_reason = reason if graph else "not asked for"
        self._graph: torch.cuda.CUDAGraph | None = None

    def prepare(self) -> None:
        if self.graph_reason is None and self._graph is None:
            self._capture()

    @torch.no_grad()
    def prefill(self, prompts: list[list[int]]) -> Tensor:
        if len(prompts) > 1 and max(map(len, prompts)) > self.chunk:
            # Later chunks of unequal rows would begin at different places, which only the reference can do; and of
            # several rows the kernels want what is held so far in one piece, which is a copy of it for each chunk.
            return torch.cat([self._prefill_row(row, prompt) for row, prompt in enumerate(prompts)])
        return self.model.logits(self._read(prompts, self.cache))

    def _prefill_row(self, row: int, prompt: list[int]) -> Tensor:
        """One prompt alone, in a cache of its own that is then moved into this row."""
        alone = [layer.make_cache(1, len(prompt)) for layer in self.model.attention_layers()]
        last = self._read([prompt], alone)
        for cache, one in zip(self.cache, alone, strict=True):
            cache.put_row(row, one)
        return self.model.logits(last)

    def _read(self, prompts: list[list[int]], caches: list) -> Tensor:
        """Hidden states of each prompt's last token."""
        longest = max(map(len, prompts))
        out: Tensor | None = None
        for first in range(0, longest, self.chunk):
            parts = [prompt[first : first + self.chunk] for prompt in prompts]
            width = max(map(len, parts))
            tokens = torch.tensor([part + [0] * (width - len(part)) for part in parts], device=self._device)
            lengths = torch.tensor([len(part) for part in parts])
            hidden = self.model.hidden(
                tokens, cache=caches, lengths=None if bool((lengths == width).all()) else lengths
            )
            # of all these positions only the last of each prompt is wanted: logits of the others are never made
            last = hidden[torch.arange(len(prompts)), (lengths - 1).clamp(min=0).to(self._device)]
            ends = torch.tensor(
                [len(p) > 0 and len(q) <= first + self.chunk for p, q in zip(parts, prompts, strict=True)]
            )
            ends = ends.to(self._device)
            out = last if out is None else torch.where(ends[:, None], last, out)
        assert out is not None
        return out

    @torch.no_grad()
    def step(self, tokens: Tensor, active: Tensor) -> Tensor:
        if self._graph is None:
            # a device is not asked whether all rows go on: that would wait for it
            all_rows = active.device.type == "cpu" and bool(active.all())
            return self._logits(tokens, None if all_rows else active)
        self._tokens.copy_(tokens)
        self._active.copy_(active)
        for cache in self.cache:
            cache.replayed()
        self._graph.replay()
        return self._out

    def take_rows(self, rows: Tensor) -> None:
        """Go on with these rows, in this order; a row may come again."""
        for cache in self.cache:
            cache.take_rows(rows)
        self.batch, self._graph = len(rows), None

    def keys_read(self) -> int | None:
        reads = [cache.reads for cache in self.cache]
        return None if any(r is None for r in reads) else sum(int(r[:, -1].sum()) for r in reads if r is not None)

    def _logits(self, tokens: Tensor, lengths: Tensor | None) -> Tensor:
        return self.model.logits(self.model.hidden(tokens[:, None], cache=self.cache, lengths=lengths)[:, -1])

    def _why_not_kernels(self) -> str | None:
        if self._device.type != "cuda":
            return f"the model is on {self._device.type}"
        x = torch.empty(self.batch, 1, self.model.config.dim, device=self._device)
        for layer, cache in zip(self.model.attention_layers(), self.cache, strict=True):
            if getattr(layer, "backend", "auto") == "reference":
                return "the reference was asked for"
            if (reason := why_not(layer, x, cache)) is not None:
                return reason
        return None

    @torch.no_grad()
    def _capture(self) -> None:
        self._tokens = torch.zeros(self.batch, dtype=torch.int64, device=self._device)
        self._active = torch.zeros(self.batch, dtype=torch.int32, device=self._device)
        before = [cache.host for cache in self.cache]
        # Once without capturing: kernels are compiled and libraries make their workspaces. All rows stand still, so
        # nothing is kept of either.
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            self._logits(self._tokens, self._active)
        here.wait_stream(aside)
        self._restore(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._out = self._logits(self._tokens, self._active)
        self._restore(before)
        self._graph = graph

    def _restore(self, before: list) -> None:
        for cache, host in zip(self.cache, before, strict=True):
            cache.host = host


class PlainDecoder:
    """Reads everything again for each token: slow, and what the others are compared with."""

    runs_ahead = False

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self._rows: list[list[int]] = []

    def prepare(self) -> None:
        pass

    def prefill(self, prompts: list[list[int]]) -> Tensor:
        self._rows = [list(prompt) for prompt in prompts]
        return self._logits()

    def step(self, tokens: Tensor, active: Tensor) -> Tensor:
        for row, token, more in zip(self._rows, tokens.tolist(), active.tolist(), strict=True):
            if more:
                row.append(token)
        return self._logits()

    def keys_read(self) -> int | None:
        return None

    def _logits(self) -> Tensor:
        # row by row: the very thing that no batching or padding can have touched
        device = self.model.embedding.weight.device
        return torch.cat(
            [self.model.logits(self.model.hidden(torch.tensor([row], device=device))[:, -1]) for row in self._rows]
        )
