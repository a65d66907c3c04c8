"""A decode step: the sequence of its launches, how work is split over programs, and what is not supported."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor

from tercet.attention.config import MOST_DECODED_BLOCKS, NSAConfig, unsupported_blocks
from tercet.attention.hardware import KERNEL_DTYPES, OLDEST_CAPABILITY, capability
from tercet.attention.kernels import table
from tercet.attention.kernels.decode.append import Held, Norms, append
from tercet.attention.kernels.decode.attend import (
    attend_prefix,
    attend_selected_window,
    empty_parts,
    read_bytes,
    read_stages,
    score_tile,
    tile_keys,
    window_tile,
)
from tercet.attention.kernels.decode.common import Heads, Scores
from tercet.attention.kernels.decode.compress import CompressionWeights
from tercet.attention.kernels.decode.merge import merge_parts
from tercet.attention.kernels.decode.scores import select_blocks

MOST_SPLITS = 128


def unsupported(device: torch.device, dtype: torch.dtype, heads: Heads, config: NSAConfig | None) -> str | None:
    """Why the kernels cannot run a step with such a cache; None if they can. config: None for dense attention."""
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"the kernels need a CUDA device: the cache is on {device.type}"
    if device.type == "cuda" and capability(device) < OLDEST_CAPABILITY:
        return f"the kernels need compute capability 8.0: {torch.cuda.get_device_name(device)} is older"
    if dtype not in KERNEL_DTYPES:
        return f"the cache is {str(dtype).removeprefix('torch.')}: it must be bfloat16, float16 or float32"
    for name, size in (("Dk", heads.key_size), ("Dv", heads.value_size)):
        if size > 256:
            return f"{name}={size} is more than 256"
    if heads.selector_size > 256:
        return f"the keys that score blocks have {heads.selector_size} channels: more than 256"
    if (per_group := heads.heads // heads.groups) > 128:
        return f"{per_group} heads per group are more than 128"
    if config is None:
        return None
    if (reason := unsupported_blocks(config)) is not None:
        return reason
    sizes = heads.heads // heads.groups, heads.key_size, heads.value_size
    if read_stages(device, dtype, *sizes, config) is None:
        return (
            f"a block of select_block={config.select_block} with Dk={heads.key_size}, Dv={heads.value_size} in "
            f"{str(dtype).removeprefix('torch.')} takes {read_bytes(dtype, *sizes, config)} bytes of shared memory, "
            f"and there are {table.shared_memory(device)}"
        )
    if heads.selector_size:
        needed = score_tile(heads, config.select_block, dtype).bytes(dtype)
        if needed > table.shared_memory(device):
            return (
                f"scoring a block of select_block={config.select_block} by {heads.selector_size} channels in "
                f"{str(dtype).removeprefix('torch.')} takes {needed} bytes of shared memory, and there are "
                f"{table.shared_memory(device)}"
            )
    return None


def too_long(tokens: int, config: NSAConfig) -> str | None:
    """Why the kernels cannot run with a cache of this capacity; None if they can."""
    if config.num_blocks(tokens) > MOST_DECODED_BLOCKS:
        most = f"{MOST_DECODED_BLOCKS} blocks of select_block={config.select_block}"
        return f"room for {tokens} tokens is more than {most}"
    return None


def nsa_step(
    q: Tensor, kv: Tensor, gates: Tensor | None, held: Held, counts: Tensor | None, config: NSAConfig, heads: Heads, *,
    branches: tuple[str, ...], shared: bool, softmax_gate: bool, norms: Norms | None,
    phi: tuple[CompressionWeights, CompressionWeights] | None, absent: int = 0,
    selector: tuple[Tensor, Tensor] | None = None, dense_below: int = 0, per: int | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(out [B, 1, H·Dv], keys read int32 [B, G, parts], selected blocks int32 [B, G, n]).

    q, kv, gates (logits; None for one branch without a gate): projections of x, [B, 1, …]. counts: int32 [B], 0 for
    rows without a new token. absent: numbers missing at the beginning of a row of kv: the compressed branch's keys, if
    those of the selected branch are compressed, or its keys and values, if nothing reads compressed tokens. selector:
    projections of a learned selector, queries and keys; its keys are not counted as read. dense_below: rows with fewer
    tokens read every block."""
    batch, device = q.shape[0], q.device
    rotated, selector_q = append(
        q.reshape(batch, -1), kv.reshape(batch, -1), held, counts, config, heads, shared=shared, absent=absent,
        norms=norms, phi=phi, selector=None if selector is None else (selector[0].flatten(1), selector[1].flatten(1)),
    )  # fmt: skip
    pairs = batch * heads.groups
    select, by_tokens = "selected" in branches, heads.selector_size > 0
    # the compressed tokens are also read if only the selection needs them
    attend = held.compressed is not None and ("compressed" in branches or (select and not by_tokens))
    split = splits or _splits(device, pairs, config.num_compressed(held.tokens), tile_keys(rotated, heads.value_size))
    a = split if attend else 0
    slots = max(config.select_count, config.num_blocks(dense_below))
    if per is None:
        alone = gates is None and branches == ("selected",)
        per = _blocks_per_part(device, pairs, slots, 0 if alone else -(-config.window // window_tile(config)))
    selected_parts = -(-slots // per) if select else 0
    window_parts = -(-config.window // (per * window_tile(config))) if "window" in branches else 0
    parts = empty_parts(rotated, heads.groups, heads.value_size, a + selected_parts + window_parts)
    scores = indices = None
    if select:
        count = config.num_blocks(held.tokens) if by_tokens else config.num_compressed(held.tokens)
        # rows of scores start at multiples of 16 bytes
        shape = batch, heads.groups if by_tokens else heads.heads, -(-max(1, count) // 4) * 4
        scores = Scores(torch.empty(shape, dtype=torch.float32, device=device), None if by_tokens else parts.lse)
    if attend or scores is not None:
        scorer, scoring = None, 0
        if scores is not None and by_tokens:
            keys = held.selector if held.selector is not None else held.selected[0]  # type: ignore[index]
            queries = rotated.flatten(1) if heads.own else selector_q
            scorer, scoring = (queries, keys), _scoring_programs(batch, keys, config, heads)
        attend_prefix(
            rotated, held.compressed if attend else None, held.lengths, counts, parts, split, config, scores,
            out="compressed" in branches, selector=scorer, scoring=scoring, sizes=heads,  # type: ignore[arg-type]
        )  # fmt: skip
    if scores is not None:
        assert held.arrived is not None
        indices = torch.empty(batch, heads.groups, config.select_count, dtype=torch.int32, device=device)
        blocks = config.num_blocks(held.tokens)
        select_blocks(scores, indices, held.lengths, counts, held.arrived[-pairs:], split, blocks, config)
    if selected_parts + window_parts:
        ring = held.window is not None
        window = None if not window_parts else held.window if ring else held.selected
        selected = held.selected if selected_parts else None
        attend_selected_window(
            rotated, selected, window, ring, indices, held.lengths, counts, parts, a, selected_parts,
            window_parts, per, config, dense_below,
        )  # fmt: skip
    ends, flat_gates = (a, a + selected_parts, parts.count), None if gates is None else gates.flatten(1)
    out = merge_parts(parts, flat_gates, held.lengths, counts, ends, q.dtype, softmax=branches if softmax_gate else ())
    return out[:, None], parts.read, indices


def dense_step(
    q: Tensor, kv: Tensor, held: Held, counts: Tensor | None, heads: Heads, *, norms: Norms | None
) -> tuple[Tensor, Tensor]:
    """(out [B, 1, H·Dv], keys read) of full attention: reads every key up to the new token of each row."""
    batch = q.shape[0]
    assert held.selected is not None
    rotated, _ = append(
        q.reshape(batch, -1), kv.reshape(batch, -1), held, counts, NSAConfig(), heads, shared=True, absent=0,
        norms=norms, phi=None,
    )  # fmt: skip
    pairs = batch * heads.groups
    a = _splits(q.device, pairs, held.tokens, tile_keys(rotated, heads.value_size))
    parts = empty_parts(rotated, heads.groups, heads.value_size, a)
    attend_prefix(rotated, held.selected, held.lengths, counts, parts, a, None, None)
    out = merge_parts(parts, None, held.lengths, counts, (a, a, a), q.dtype)
    return out[:, None], parts.read


def _splits(device: torch.device, pairs: int, keys: int, tile: int) -> int:
    """Programs per (row, KV head): two per multiprocessor, and no more than there are tiles."""
    return max(1, min(MOST_SPLITS, -(-keys // tile), 2 * _multiprocessors(device) // pairs))


def _scoring_programs(batch: int, keys: Tensor, config: NSAConfig, heads: Heads) -> int:
    """Programs per row and `ScoreTile.groups` that read the keys by which blocks are scored: four per multiprocessor,
    and no more than there are tiles."""
    tile = score_tile(heads, config.select_block, keys.dtype)
    sets, tiles = batch * -(-heads.groups // tile.groups), -(-keys.shape[1] // tile.tokens)
    return max(1, min(tiles, 4 * _multiprocessors(keys.device) // sets))


def _blocks_per_part(device: torch.device, pairs: int, blocks: int, window_tiles: int) -> int:
    """Blocks per program: one while multiprocessors are idle, four where programs would queue; more if the merge could
    not hold that many parts."""
    per = 1 if pairs * (blocks + window_tiles) <= 4 * _multiprocessors(device) else 4
    while -(-blocks // per) + -(-window_tiles // per) > MOST_SPLITS:
        per *= 2
    return per


@lru_cache(maxsize=64)
def _multiprocessors_of(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 8
    return _multiprocessors_of(torch.cuda.current_device() if device.index is None else device.index)
