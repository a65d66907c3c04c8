"""Native Sparse Attention in float64 loops: the oracle that every backend is tested against.

Shares no code with the package, vectorises nothing over tokens, heads or blocks, and uses no masks: each query checks
key by key whether it may see that key. Slow, and meant to be read next to the paper.
"""

# q: [B, T, H, Dk]   kc, vc: [B, Tc, G, Dk|Dv]   ks, vs, kw, vw: [B, T, G, Dk|Dv]   gates: [B, T, H, 3]

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass
class Selection:
    """Selection of one (batch, token, group) and its scores; blocks are counted within the document."""

    current: int
    scores: list[float]
    forced: set[int]
    chosen: list[int]

    def boundary(self) -> tuple[float, float] | None:
        """Scores of the worst selected and the best omitted free block; None if there was no choice."""
        taken = [self.scores[j] for j in self.chosen if j not in self.forced]
        left = [self.scores[j] for j in range(self.current + 1) if j not in self.chosen and j not in self.forced]
        return (min(taken), max(left)) if taken and left else None

    def near_tie(self, relative: float) -> bool:
        """Whether rounding may change the selection. Two scores of exactly 0 are a true tie instead."""
        edge = self.boundary()
        if edge is None or edge[0] == 0.0:
            return False
        return edge[0] - edge[1] <= relative * abs(edge[0])

    def accepts(self, chosen: list[int], relative: float) -> bool:
        """Whether another implementation's set is correct: equal, or different only by a near-tie."""
        if chosen == self.chosen:
            return True
        if chosen != sorted(set(chosen)) or len(chosen) != len(self.chosen) or not self.forced <= set(chosen):
            return False
        if any(j < 0 or j > self.current for j in chosen) or not self.near_tie(relative):
            return False
        worst_taken, _ = self.boundary() or (0.0, 0.0)
        swapped = set(chosen) ^ set(self.chosen)
        return all(abs(self.scores[j] - worst_taken) <= 2 * relative * abs(worst_taken) for j in swapped)


@dataclass
class Answer:
    out: Array
    compressed: Array
    selected: Array
    window: Array
    block_indices: Array
    selections: dict[tuple[int, int, int], Selection] = field(default_factory=dict)


def visible_compressed(t: int, l: int, d: int) -> list[int]:
    """Compressed tokens whose raw tokens are all at or before query t."""
    seen = []
    i = 0
    while i * d + l - 1 <= t:
        seen.append(i)
        i += 1
    return seen


@cache
def overlap(i: int, j: int, l: int, d: int, block: int) -> int:
    """Raw tokens shared by compressed token i and selection block j, counted one by one."""
    return sum(1 for s in range(i * d, i * d + l) if j * block <= s < (j + 1) * block)


def softmax_attend(q: Array, keys: list[Array], values: list[Array], width: int) -> tuple[Array, list[float]]:
    """One query over the given keys; exactly zero without keys."""
    if not keys:
        return np.zeros(width), []
    logits = [float(np.dot(q, k)) / math.sqrt(len(q)) for k in keys]
    top = max(logits)
    weights = [math.exp(z - top) for z in logits]
    total = math.fsum(weights)
    probabilities = [e / total for e in weights]
    out = np.zeros(width)
    for p, v in zip(probabilities, values, strict=True):
        out = out + p * v
    return out, probabilities


def forced_blocks(t: int, cfg: Any) -> set[int]:
    current = t // cfg.select_block
    forced = {j for j in range(cfg.select_initial) if j <= current}
    return forced | {j for j in range(current - cfg.select_local + 1, current + 1) if j >= 0}


def choose(scores: list[Any], t: int, cfg: Any) -> Selection:
    """Eq. 11: the forced set, then the best of the rest by (score descending, index ascending)."""
    current = t // cfg.select_block
    forced = forced_blocks(t, cfg)
    chosen = set(forced)
    while len(chosen) < min(cfg.select_count, current + 1):
        best = None
        for j in range(current + 1):
            if j not in chosen and (best is None or scores[j] > scores[best]):
                best = j
        assert best is not None
        chosen.add(best)
    return Selection(current, list(scores), forced, sorted(chosen))


def importance(probabilities: list[Any], current: int, cfg: Any) -> list[Any]:
    """Eq. 9 with the true overlap: scores of blocks 0..current under one head's compressed probabilities."""
    scores: list[Any] = []
    for j in range(current + 1):
        total: Any = 0
        for i, p in enumerate(probabilities):
            shared = overlap(i, j, cfg.compress_block, cfg.compress_stride, cfg.select_block)
            total += (
                p * Fraction(shared, cfg.compress_block) if isinstance(p, Fraction) else p * shared / cfg.compress_block
            )
        scores.append(total)
    return scores


def nsa(q, kc, vc, ks, vs, kw, vw, gates, cfg, cu_seqlens=None, block_indices=None) -> Answer:
    """The operator, steps 1 to 7. With `block_indices` [B, T, G, n] those blocks are read instead of the selected ones;
    the selection is still computed and returned, for comparison."""
    q, kc, vc, ks, vs, kw, vw, gates = (np.asarray(x, dtype=np.float64) for x in (q, kc, vc, ks, vs, kw, vw, gates))
    batch, tokens, heads, _ = q.shape
    groups, width = ks.shape[2], vs.shape[3]
    answer = Answer(
        *(np.zeros((batch, tokens, heads, width)) for _ in range(4)),
        block_indices=np.full((batch, tokens, groups, cfg.select_count), -1, dtype=np.int64),
    )
    bounds = [0, tokens] if cu_seqlens is None else [int(c) for c in cu_seqlens]
    for b in range(batch):
        compressed_start = 0
        for start, end in itertools.pairwise(bounds):
            for t in range(end - start):
                _query(
                    b, t, start, compressed_start, q, kc, vc, ks, vs, kw, vw, gates, cfg, block_indices, answer,
                )  # fmt: skip
            if end > start:
                compressed_start += len(visible_compressed(end - start - 1, cfg.compress_block, cfg.compress_stride))
    return answer


def _query(b, t, start, compressed_start, q, kc, vc, ks, vs, kw, vw, gates, cfg, given, answer) -> None:
    """Token t of the document whose rows start at `start`, its compressed tokens at `compressed_start`."""
    heads, groups, width = q.shape[2], ks.shape[2], vs.shape[3]
    per_group = heads // groups
    row = start + t
    seen = visible_compressed(t, cfg.compress_block, cfg.compress_stride)
    current = t // cfg.select_block
    for g in range(groups):
        scores = [0.0] * (current + 1)
        for head in range(g * per_group, (g + 1) * per_group):
            out, probabilities = softmax_attend(
                q[b, row, head],
                [kc[b, compressed_start + i, g] for i in seen],
                [vc[b, compressed_start + i, g] for i in seen],
                width,
            )
            answer.compressed[b, row, head] = out
            scores = [a + s for a, s in zip(scores, importance(probabilities, current, cfg), strict=True)]
        selection = choose(scores, t, cfg)
        answer.selections[b, row, g] = selection
        answer.block_indices[b, row, g, : len(selection.chosen)] = selection.chosen
        read = selection.chosen if given is None else [int(j) for j in given[b, row, g] if j >= 0]

        selected_tokens = [s for s in range(t + 1) if s // cfg.select_block in read]
        window_tokens = [s for s in range(t + 1) if s > t - cfg.window]
        for head in range(g * per_group, (g + 1) * per_group):
            for branch, keys, values, visible in (
                (answer.selected, ks, vs, selected_tokens),
                (answer.window, kw, vw, window_tokens),
            ):
                branch[b, row, head], _ = softmax_attend(
                    q[b, row, head],
                    [keys[b, start + s, g] for s in visible],
                    [values[b, start + s, g] for s in visible],
                    width,
                )
            answer.out[b, row, head] = (
                gates[b, row, head, 0] * answer.compressed[b, row, head]
                + gates[b, row, head, 1] * answer.selected[b, row, head]
                + gates[b, row, head, 2] * answer.window[b, row, head]
            )


def block_sparse(q, k, v, cfg, dense_below=0, cu_seqlens=None, block_indices=None) -> Answer:
    """Block-sparse mode: `out` reads the selected blocks, chosen by the means of the keys; queries at positions below
    `dense_below` read every key up to their own."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    means, _ = compress_mean(k, cfg, cu_seqlens)
    unused = np.zeros((*means.shape[:3], v.shape[3]))
    gates = np.zeros((*q.shape[:3], 3))
    answer = nsa(q, means, unused, k, v, k, v, gates, cfg, cu_seqlens, block_indices)
    answer.out = answer.selected.copy()
    bounds = [0, q.shape[1]] if cu_seqlens is None else [int(c) for c in cu_seqlens]
    for start, end in itertools.pairwise(bounds):
        early = slice(start, start + min(end - start, dense_below))
        answer.out[:, early] = causal_attention(q[:, early], k[:, early], v[:, early])
    return answer


def own_selections(q, k, cfg, channels=None, cu_seqlens=None) -> dict[tuple[int, int, int], Selection]:
    """Blocks chosen by own queries and keys, of each (batch, row, group): a block scores the largest product, over the
    group's `channels`, of any head of the group with any of the block's tokens."""
    q, k = (np.asarray(x, dtype=np.float64) for x in (q, k))
    per_group = q.shape[2] // k.shape[2]
    bounds = [0, q.shape[1]] if cu_seqlens is None else [int(c) for c in cu_seqlens]
    found = {}
    for b, (start, end), g in itertools.product(range(q.shape[0]), itertools.pairwise(bounds), range(k.shape[2])):
        read = range(k.shape[3]) if channels is None else np.broadcast_to(channels, (k.shape[2], len(channels.T)))[g]
        for t in range(end - start):
            scores = [-np.inf] * (t // cfg.select_block + 1)
            for s, head in itertools.product(range(t + 1), range(g * per_group, (g + 1) * per_group)):
                product = sum(q[b, start + t, head, c] * k[b, start + s, g, c] for c in read)
                scores[s // cfg.select_block] = max(scores[s // cfg.select_block], product)
            found[b, start + t, g] = choose(scores, t, cfg)
    return found


def causal_attention(q, k, v) -> Array:
    """Full causal attention, one query at a time, for the dense limits of NSA."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    batch, tokens, heads, _ = q.shape
    per_group = heads // k.shape[2]
    out = np.zeros((batch, tokens, heads, v.shape[3]))
    for b in range(batch):
        for t in range(tokens):
            for head in range(heads):
                g = head // per_group
                out[b, t, head], _ = softmax_attend(
                    q[b, t, head],
                    [k[b, s, g] for s in range(t + 1)],
                    [v[b, s, g] for s in range(t + 1)],
                    v.shape[3],
                )
    return out


def rope(x, positions, theta: float = 10000.0, scaling: float = 1.0) -> Array:
    """Half-rotation as in Llama: component i rotates with component i + D/2. x: [B, T, heads, D]."""
    x = np.asarray(x, dtype=np.float64)
    batch, tokens, heads, size = x.shape
    half = size // 2
    out = np.zeros_like(x)
    for b in range(batch):
        for t in range(tokens):
            for head in range(heads):
                for i in range(half):
                    angle = positions[t] / scaling * theta ** (-2.0 * i / size)
                    first, second = x[b, t, head, i], x[b, t, head, i + half]
                    out[b, t, head, i] = first * math.cos(angle) - second * math.sin(angle)
                    out[b, t, head, i + half] = second * math.cos(angle) + first * math.sin(angle)
    return out


def document_positions(tokens: int, cu_seqlens=None) -> list[int]:
    """Each token's position within its own document."""
    bounds = [0, tokens] if cu_seqlens is None else [int(c) for c in cu_seqlens]
    return [t for start, end in itertools.pairwise(bounds) for t in range(end - start)]


def compress_mean(x, cfg, cu_seqlens=None) -> tuple[Array, list[int]]:
    """Mean of each compressed block, document by document, and the position at which its key is rotated."""
    x = np.asarray(x, dtype=np.float64)
    batch, tokens, groups, size = x.shape
    bounds = [0, tokens] if cu_seqlens is None else [int(c) for c in cu_seqlens]
    rows: list[Array] = []
    last_positions: list[int] = []
    for start, end in itertools.pairwise(bounds):
        i = 0
        while i * cfg.compress_stride + cfg.compress_block <= end - start:
            total = np.zeros((batch, groups, size))
            for s in range(cfg.compress_block):
                total = total + x[:, start + i * cfg.compress_stride + s]
            rows.append(total / cfg.compress_block)
            last_positions.append(i * cfg.compress_stride + cfg.compress_block - 1)
            i += 1
    if not rows:
        return np.zeros((batch, 0, groups, size)), []
    return np.stack(rows, axis=1), last_positions
