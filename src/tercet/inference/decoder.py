"""Prefill a batch of prompts, then decode one token per row and step. Inference only; no autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from tercet.model.decode import why_not_token_kernels
from tercet.model.transformer import Transformer

PREFILL_CHUNK = 8192


class CachedDecoder:
    """Decodes a batch of sequences of different lengths with a KV cache. Prompts are read in chunks, which bounds the
    memory for activations.

    graph         capture the step as a CUDA graph if all layers decode on the kernels; `graph_reason` says why not
    asynchronous  steps never synchronize with the host: the next can be launched before this one's token has arrived
    """

    def __init__(
        self, model: Transformer, batch: int, max_len: int, *, chunk: int = PREFILL_CHUNK, graph: bool = True
    ) -> None:
        self.model, self.chunk, self.batch = model, chunk, batch
        self.cache = [layer.make_cache(batch, max_len) for layer in model.attention_layers()]
        self._device = model.embedding.weight.device
        reason = self._why_not_kernels()
        self.asynchronous = reason is None
        self.graph_reason = reason if graph else "disabled"
        self._graph: torch.cuda.CUDAGraph | None = None

    def prepare(self) -> None:
        """Capture the CUDA graph, before the first step."""
        if self.graph_reason is None and self._graph is None:
            self._capture()

    @torch.no_grad()
    def prefill(self, prompts: list[list[int]]) -> Tensor:
        """Read the prompts; returns the logits [B, V] after each prompt's last token."""
        if len(prompts) > 1 and max(map(len, prompts)) > self.chunk:
            # Row by row: chunks that start at different positions need the reference, and for several rows the
            # kernels would copy the whole cache for every chunk.
            return torch.cat([self._prefill_row(row, prompt) for row, prompt in enumerate(prompts)])
        return self.model.logits(self._read(prompts, self.cache))

    def _prefill_row(self, row: int, prompt: list[int]) -> Tensor:
        """Read one prompt into a cache of batch size 1, then copy that into the row."""
        single = [layer.make_cache(1, len(prompt)) for layer in self.model.attention_layers()]
        last = self._read([prompt], single)
        for cache, source in zip(self.cache, single, strict=True):
            cache.put_row(row, source)
        return self.model.logits(last)

    def _read(self, prompts: list[list[int]], caches: list) -> Tensor:
        """Fill the caches; returns the hidden state of each prompt's last token."""
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
            # Keep only the last position of each prompt: computing all logits would be expensive.
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
        """Read one more token of each active row; returns the logits [B, V] after it, valid until the next step.

        tokens: int64 [B]; active: int32 [B]. The logits of inactive rows are undefined.
        """
        if self._graph is None:
            # Checking this on a GPU would synchronize.
            all_rows = active.device.type == "cpu" and bool(active.all())
            return self._logits(tokens, None if all_rows else active)
        self._tokens.copy_(tokens)
        self._active.copy_(active)
        for cache in self.cache:
            cache.count_replay()
        self._graph.replay()
        return self._out

    def take_rows(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be repeated."""
        for cache in self.cache:
            cache.take_rows(rows)
        self.batch, self._graph = len(rows), None

    def keys_read(self) -> int | None:
        """Keys read in the last step, over all rows, KV heads and layers; None if not counted."""
        reads = [cache.reads for cache in self.cache]
        return None if any(r is None for r in reads) else sum(int(r[:, -1].sum()) for r in reads if r is not None)

    def _logits(self, tokens: Tensor, lengths: Tensor | None) -> Tensor:
        return self.model.logits(self.model.hidden(tokens[:, None], cache=self.cache, lengths=lengths)[:, -1])

    def _why_not_kernels(self) -> str | None:
        if self._device.type != "cuda":
            return f"the model is on {self._device.type}"
        for layer, cache in zip(self.model.attention_layers(), self.cache, strict=True):
            if layer.backend == "reference":
                return "model.backend=reference was requested"
            if (reason := why_not_token_kernels(layer, cache)) is not None:
                return reason
        return None

    @torch.no_grad()
    def _capture(self) -> None:
        self._tokens = torch.zeros(self.batch, dtype=torch.int64, device=self._device)
        self._active = torch.zeros(self.batch, dtype=torch.int32, device=self._device)
        before = [cache.host_lengths for cache in self.cache]
        # Warm up on a side stream: compiles kernels, allocates workspaces. No row is active, so caches stay unchanged.
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._logits(self._tokens, self._active)
        current.wait_stream(side)
        self._restore(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._out = self._logits(self._tokens, self._active)
        self._restore(before)
        self._graph = graph

    def _restore(self, before: list) -> None:
        for cache, host in zip(self.cache, before, strict=True):
            cache.host_lengths = host
