"""A decode step on the GPU: one new token for each row of a batch, of any lengths.

    append   turn q and k to their positions, keep k and v, run φ on blocks that are complete now
    attend   the compressed tokens, split over programs; scores are kept
    score    importance of blocks, and the choice of the best
    read     the selected blocks and the window
    merge    parts into branches, gates, and the token is counted

Five launches (three for dense attention), nothing read back by the host, nothing whose size depends on lengths: fit
for a CUDA graph. Scratch is for the longest row that the stores have room for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from tercet.attention.config import MOST_DECODED_BLOCKS, NSAConfig
from tercet.attention.kernels import settings
from tercet.attention.kernels.decode_append import Held, Norms, append, arrivals
from tercet.attention.kernels.decode_attend import (
    attend,
    empty_parts,
    read,
    read_bytes,
    read_stages,
    tile,
    window_tile,
)
from tercet.attention.kernels.decode_compress import CompressionWeights
from tercet.attention.kernels.decode_merge import merge
from tercet.attention.kernels.decode_select import score

__all__ = ["CompressionWeights", "Heads", "Held", "Norms", "arrivals", "dense_step", "nsa_step", "unsupported"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_SPLITS = 128


@dataclass(frozen=True)
class Heads:
    heads: int
    groups: int
    key_size: int
    value_size: int


def unsupported(device: torch.device, dtype: torch.dtype, heads: Heads, config: NSAConfig | None) -> str | None:
    """Why these kernels cannot run a step with such a cache; None if they can. config is None for dense attention."""
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"the kernels need a CUDA device: the cache is on {device.type}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"the kernels need compute capability 8.0: {torch.cuda.get_device_name(device)} is older"
    if dtype not in _DTYPES:
        return f"the cache is {str(dtype).removeprefix('torch.')}: it must be bfloat16, float16 or float32"
    for name, size in (("Dk", heads.key_size), ("Dv", heads.value_size)):
        if size > 256:
            return f"{name}={size} is more than 256"
    if heads.heads // heads.groups > 128:
        return f"{heads.heads // heads.groups} heads per group are more than 128"
    if config is None:
        return None
    if (reason := settings.unfit_blocks(config)) is not None:
        return reason
    sizes = heads.heads // heads.groups, heads.key_size, heads.value_size
    if read_stages(device, dtype, *sizes, config) is None:
        return (
            f"a block of select_block={config.select_block} with Dk={heads.key_size}, Dv={heads.value_size} in "
            f"{str(dtype).removeprefix('torch.')} takes {read_bytes(dtype, *sizes, config)} bytes of shared memory, "
            f"and there are {settings.shared_memory(device)}"
        )
    return None


def too_long(tokens: int, config: NSAConfig) -> str | None:
    """Why a cache with room for so many tokens is beyond the kernels; None if it is not."""
    if config.num_blocks(tokens) > MOST_DECODED_BLOCKS:
        most = f"{MOST_DECODED_BLOCKS} blocks of select_block={config.select_block}"
        return f"room for {tokens} tokens is more than {most}"
    return None


def nsa_step(
    q: Tensor, kv: Tensor, gates: Tensor, held: Held, counts: Tensor | None, config: NSAConfig, heads: Heads, *,
    branches: tuple[str, ...], shared: bool, softmax_gate: bool, norms: Norms | None,
    phi: tuple[CompressionWeights, CompressionWeights], per: int | None = None, splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """q, kv and the gates' logits are projections of x: [B, 1, …]. counts: int32 [B], 0 for rows that stand still.

    Returns out [B, 1, H·Dv], keys read int32 [B, G, parts] and the selected blocks int32 [B, G, n]."""
    batch, device = q.shape[0], q.device
    turned = append(
        q.reshape(batch, -1), kv.reshape(batch, -1), held, counts, config, heads=heads.heads, groups=heads.groups,
        key_size=heads.key_size, value_size=heads.value_size, shared=shared, norms=norms, phi=phi,
    )  # fmt: skip
    pairs = batch * heads.groups
    a = 0
    if held.compressed is not None:
        a = splits or _splits(device, pairs, config.num_compressed(held.tokens), tile(turned, heads.value_size))
    if per is None:
        per = _blocks_per_part(device, pairs, config)
    selected_parts = -(-config.select_count // per) if "selected" in branches else 0
    window_parts = -(-config.window // (per * window_tile(config))) if "window" in branches else 0
    parts = empty_parts(turned, heads.groups, heads.value_size, a + selected_parts + window_parts)
    indices = None
    if held.compressed is not None:
        logits = None
        if "selected" in branches:
            # 16 bytes: rows of logits begin at aligned addresses
            room = -(-max(1, config.num_compressed(held.tokens)) // 4) * 4
            logits = torch.empty(batch, heads.heads, room, dtype=torch.float32, device=device)
        keys, values = held.compressed
        attend(turned, keys, values, held.lengths, counts, parts, a, config, logits, out="compressed" in branches)
        if logits is not None:
            assert held.arrived is not None
            indices = torch.empty(batch, heads.groups, config.select_count, dtype=torch.int32, device=device)
            arrived = held.arrived[-pairs:]
            blocks = config.num_blocks(held.tokens)
            score(logits, parts.lse, indices, held.lengths, counts, arrived, a, blocks, config)
    if selected_parts + window_parts:
        ring = held.window is not None
        window = None if not window_parts else held.window if ring else held.selected
        selected = held.selected if selected_parts else None
        read(
            turned, selected, window, ring, indices, held.lengths, counts, parts, a, selected_parts,
            window_parts, per, config,
        )  # fmt: skip
    ends = (a, a + selected_parts, parts.count)
    out = merge(parts, gates, held.lengths, counts, ends, q.dtype, softmax=softmax_gate)
    return out[:, None], parts.read, indices


def dense_step(
    q: Tensor, kv: Tensor, held: Held, counts: Tensor | None, heads: Heads, *, norms: Norms | None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Full attention of one new token for each row: every key up to it is read. out [B, 1, H·Dv] and keys read."""
    batch = q.shape[0]
    assert held.selected is not None
    turned = append(
        q.reshape(batch, -1), kv.reshape(batch, -1), held, counts, NSAConfig(), heads=heads.heads, groups=heads.groups,
        key_size=heads.key_size, value_size=heads.value_size, shared=True, norms=norms, phi=None,
    )  # fmt: skip
    pairs = batch * heads.groups
    a = splits or _splits(q.device, pairs, held.tokens, tile(turned, heads.value_size))
    parts = empty_parts(turned, heads.groups, heads.value_size, a)
    attend(turned, *held.selected, held.lengths, counts, parts, a, None, None)
    out = merge(parts, None, held.lengths, counts, (a, a, a), q.dtype)
    return out[:, None], parts.read


def _splits(device: torch.device, pairs: int, keys: int, tile: int) -> int:
    """Programs per (row, KV head): all multiprocessors busy twice over, and no more than there are tiles."""
    return max(1, min(MOST_SPLITS, -(-keys // tile), 2 * _multiprocessors(device) // pairs))


def _blocks_per_part(device: torch.device, pairs: int, config: NSAConfig) -> int:
    """One block to a program where that leaves multiprocessors idle; four where programs would queue up; more where
    the merge could not hold their parts beside those of the compressed tokens."""
    programs = pairs * (config.select_count + -(-config.window // window_tile(config)))
    per = 1 if programs <= 4 * _multiprocessors(device) else 4
    while -(-config.select_count // per) + -(-config.window // (per * window_tile(config))) > MOST_SPLITS:
        per *= 2
    return per


@lru_cache(maxsize=64)
def _of_device(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 8
    return _of_device(torch.cuda.current_device() if device.index is None else device.index)
