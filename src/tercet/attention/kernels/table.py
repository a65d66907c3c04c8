"""Which kernel runs, and with which launch settings. The launch code reads this table.

Each row of TABLE says: for this stage, on these architectures, at these head sizes, the kernel in this module runs with
these settings. The first row that fits a call wins. Nothing is searched at run time: the first call compiles one
variant and Triton's cache keeps it.

The selected branch has one more level. Its settings (SELECTED) follow from dtype, head sizes and select_block; which of
its two designs runs then depends on the selection itself (selected/__init__.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.hardware import capability
from tercet.attention.kernels import hopper
from tercet.attention.kernels.launch import describable, padded


@dataclass(frozen=True)
class Launch:
    rows: int = 64  # M: queries per tile
    keys: int = 64  # N: keys per tile
    warps: int = 4
    stages: int = 2
    tma: bool = False  # load whole tiles with TMA, where strides allow it
    parts: int = 16  # most query ranges that share one dK/dV tile of the compressed branch
    registers: int = 0  # cap per thread, to fit more programs on a multiprocessor; 0: let the compiler choose
    held: int = 2  # most row tiles that hold the heads of a group, for the scores
    gathering: int = 40  # registers per thread of the warps that gather rows (hopper.selected_*)

    @property
    def options(self) -> dict[str, int]:
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | {"maxnreg": self.registers} if self.registers else options

    @property
    def gluon_options(self) -> dict[str, int]:
        """Gluon kernels manage their stages themselves."""
        options = {"num_warps": self.warps}
        return options | {"maxnreg": self.registers} if self.registers else options


class Row(NamedTuple):
    stages: tuple[str, ...]
    module: str  # of this package; "" for the stage's own Triton kernel
    majors: tuple[int, ...]  # compute capability; empty: any
    heads: tuple[int, ...]  # the larger of Dk and Dv, padded to a power of two, at least 64
    launch: Launch
    float32: bool = False
    packed: bool = True  # also for packed documents
    query_range: bool = True  # also where q holds only part of the tokens

    @property
    def gluon(self) -> bool:
        """Needs Dk = Dv, bf16 or fp16, and tensors that TMA can load."""
        return self.module.startswith("hopper.")


# Stages that have a Triton kernel, which takes every call.
ALL = (
    "compressed_forward", "score", "token_score", "own_score", "window_forward", "query_gradient",
    "compressed_key_gradients", "window_key_gradients",
)  # fmt: skip
FORWARD = ("compressed_forward", "window_forward")
DKV = ("compressed_key_gradients", "window_key_gradients")
SELECTED_DKV = ("selected_key_gradients",)

TABLE: tuple[Row, ...] = (
    # float32 is for checks, not for speed: its tiles are four times the bytes of a bf16 pair
    Row(DKV, "", (), (256,), Launch(rows=16, keys=32, stages=1), float32=True),
    Row(ALL, "", (), (64, 128, 256), Launch(rows=32, keys=32, stages=1), float32=True),
    # Hopper, in Gluon
    Row(FORWARD, "hopper.forward", (9,), (64, 96, 128), Launch(), query_range=False),
    # at head 64 Triton's dQ is as fast at 2k and 8k, and faster at 64k
    Row(("query_gradient",), "hopper.dq", (9,), (96, 128), Launch(), packed=False, query_range=False),
    Row(("compressed_key_gradients",), "hopper.dkv", (9,), (64,), Launch(stages=3, parts=48)),
    Row(("window_key_gradients",), "hopper.dkv", (9,), (64,), Launch(stages=3)),
    Row(DKV, "hopper.dkv", (9,), (96, 128), Launch()),
    Row(("score",), "hopper.scores", (9,), (64,), Launch(held=6), query_range=False),
    Row(("score",), "hopper.scores", (9,), (96, 128), Launch(held=4), query_range=False),
    # registers: the mean over the warps that gather and those that multiply
    Row(("selected_partials",), "hopper.selected_forward", (9,), (64,), Launch(stages=4, registers=64)),
    Row(("selected_partials",), "hopper.selected_forward", (9,), (96, 128), Launch(registers=80)),
    Row(SELECTED_DKV, "hopper.selected_dkv", (9,), (64,), Launch(stages=4, registers=128, gathering=48)),
    # dK and dV take half of a thread's registers: with 64 rows per step, their scores would spill
    Row(SELECTED_DKV, "hopper.selected_dkv", (9,), (128,), Launch(32, stages=4, registers=128, gathering=24)),
    Row(SELECTED_DKV, "hopper.selected_dkv", (9,), (96,), Launch(32, stages=4, registers=128, gathering=32)),
    # Hopper and Blackwell, in Triton
    Row(FORWARD, "", (9, 10), (64,), Launch(stages=2, tma=True)),
    Row(FORWARD, "", (9, 10), (128,), Launch(stages=3, tma=True)),
    Row(FORWARD, "", (9, 10), (256,), Launch(keys=32, stages=3)),
    Row(("score",), "", (9, 10), (64,), Launch(stages=2, tma=True, held=6, registers=168)),
    Row(("score",), "", (9, 10), (128,), Launch(stages=2, tma=True)),
    Row(("score",), "", (9, 10), (256,), Launch(stages=1)),
    Row(("token_score",), "", (9, 10), (64,), Launch(keys=256, stages=3, tma=True)),
    Row(("token_score",), "", (9, 10), (128, 256), Launch(keys=128, tma=True)),
    Row(("own_score",), "", (9, 10), (64, 128, 256), Launch(keys=128, stages=3, tma=True)),
    Row(("query_gradient",), "", (9, 10), (64,), Launch(stages=2, tma=True, registers=128)),
    Row(("query_gradient",), "", (9, 10), (128,), Launch(stages=2, tma=True)),
    Row(("query_gradient",), "", (9, 10), (256,), Launch(keys=32)),
    Row(("compressed_key_gradients",), "", (9, 10), (64,), Launch(stages=3, tma=True, parts=48)),
    Row(("window_key_gradients",), "", (9, 10), (64,), Launch(rows=32, stages=3, tma=True)),
    Row(DKV, "", (9, 10), (128,), Launch(rows=32, stages=3, tma=True)),
    Row(("compressed_key_gradients",), "", (9, 10), (256,), Launch(keys=32, parts=48)),
    Row(("window_key_gradients",), "", (9, 10), (256,), Launch(keys=32)),
    # Ampere and the rest: no TMA, and as little as 99 KiB of shared memory (sm_86, sm_89, sm_120). Conservative;
    # compiled in the tests, never timed.
    Row(ALL, "", (), (64, 128), Launch()),
    Row(DKV, "", (), (256,), Launch(rows=32, keys=32, warps=8, stages=1)),
    Row(ALL, "", (), (256,), Launch(keys=32, warps=8, stages=1)),
)


@lru_cache(maxsize=1024)
def _rows(
    stage: str, major: int, head: int, float32: bool, packed: bool, query_range: bool
) -> tuple[Row | None, Row | None]:
    """(Gluon row, Triton row) of a call."""
    found = [
        row
        for row in TABLE
        if stage in row.stages
        and (not row.majors or major in row.majors)
        and head in row.heads
        and row.float32 == float32
        and (row.packed or not packed)
        and (row.query_range or not query_range)
    ]
    gluon = next((row for row in found if row.gluon), None) if hopper.GLUON_INSTALLED else None
    return gluon, next((row for row in found if not row.gluon), None)


def gluon_launch(stage: str, *tensors: Tensor, packed: bool = False, query_range: bool = False) -> Launch | None:
    """Launch settings if the stage's Gluon kernel takes the call; `tensors` are those it loads in tiles, q first."""
    q = tensors[0]
    size = q.shape[-1]
    row, _ = _rows(stage, generation(q), size, q.dtype == torch.float32, packed, query_range)
    if row is None or any(x.shape[-1] != size or not describable(x) for x in tensors):
        return None
    return row.launch


def triton_launch(stage: str, q: Tensor, v: Tensor) -> Launch:
    """Launch settings of the stage's Triton kernel."""
    head = max(64, padded(max(q.shape[-1], v.shape[-1])))
    _, row = _rows(stage, generation(q), head, q.dtype == torch.float32, False, False)
    assert row is not None
    return row.launch


# ------------------------------------------------------------ the selected branch

FEWEST_ROWS = 16  # of a tile: what tensor cores multiply
LARGEST_BLOCK = 64  # keys; the kernels read larger blocks in parts of this size
GLUON_BLOCKS = {64: (32, 64), 96: (64,), 128: (64,)}  # head size -> select_block of hopper.selected_*
HOPPER_SHARED = 227 * 1024


@dataclass(frozen=True)
class SelectedSettings:
    """Tile sizes, launch settings and limits of the selected branch. Measured on an H200."""

    # query-major (query_major.py)
    tile_rows: int = 64  # (query, head) rows per tile
    forward_stages: int = 3
    forward_registers: int = 0  # cap per thread; 0: let the compiler choose
    dq_stages: int = 2
    dq_registers: int = 0
    # KV-major (kv_major.py): rows per step of the forward, of dK/dV, and of dK/dV with dQ
    kv_forward_rows: int = 64
    kv_forward_stages: int = 1
    dkv_rows: int = 64
    dkv_stages: int = 2
    dkv_dq_rows: int = 64
    dkv_dq_stages: int = 1
    dkv_transposed: bool = False  # dK/dV without dQ computes Sᵀ (kv_major.dkv_transposed)
    segment_rows: int = 2048  # most rows per piece
    # both
    forward_warps: int = 4
    backward_warps: int = 4
    gluon: bool = True  # use hopper/selected_dkv.py where it takes the call
    tma: bool = True  # load K and V with TMA, where the device has it and strides allow it
    # KV-major runs where a tile list has more blocks on average than this multiple of select_count
    forward_limit: float = 3.0
    backward_limit: float = 2.9
    range_bytes: int = 1 << 31  # most scratch of the KV-major design, per range


# (condition, settings); the first that holds wins. float32 is for checks, not for speed.
SELECTED: tuple[tuple[str, SelectedSettings], ...] = (
    (
        "float32",
        SelectedSettings(
            tile_rows=32, kv_forward_rows=32, dkv_rows=32, dkv_dq_rows=32, forward_stages=1, dq_stages=1, dkv_stages=1
        ),
    ),
    (
        "head > 128",
        SelectedSettings(
            forward_stages=1, kv_forward_stages=2, backward_warps=8, dq_stages=1, dkv_stages=1, backward_limit=1.6
        ),
    ),
    (
        "head ≤ 64",
        SelectedSettings(
            forward_stages=2,
            forward_registers=128,
            dq_registers=128,
            kv_forward_stages=3,
            dkv_stages=3,
            dkv_dq_stages=2,
            dkv_transposed=True,
            segment_rows=4096,
            forward_limit=2.6,
            backward_limit=1.6,
        ),
    ),
    # where Hopper's kernels run
    ("head 96 or 128, blocks of 64", SelectedSettings(segment_rows=4096, forward_limit=2.8, backward_limit=1.6)),
    ("head ≤ 128", SelectedSettings(segment_rows=4096)),
)


def block_parts(config: NSAConfig) -> int:
    """How many blocks the kernels read in place of one selected block."""
    return max(1, config.select_block // LARGEST_BLOCK)


@lru_cache(maxsize=64)
def selected_settings(
    dk: int, dv: int, dtype: torch.dtype, select_block: int, shared: int = HOPPER_SHARED
) -> SelectedSettings:
    """`shared`: bytes that one program may use. With less than Hopper's, tiles have fewer rows where they must."""
    holds = {
        "float32": dtype == torch.float32,
        "head > 128": max(dk, dv) > 128,
        "head ≤ 64": max(dk, dv) <= 64,
        "head 96 or 128, blocks of 64": dk == dv and dk in (96, 128) and select_block == 64,
        "head ≤ 128": True,
    }
    settings = next(settings for condition, settings in SELECTED if holds[condition])
    sizes = (dk, dv, dtype, select_block)
    rows, dq_rows = settings.tile_rows, settings.dkv_dq_rows
    while rows > FEWEST_ROWS and selected_bytes(rows, *sizes) > shared:
        rows //= 2
    while dq_rows > FEWEST_ROWS and selected_bytes(dq_rows, *sizes, with_dq=True) > shared:
        dq_rows //= 2
    if rows < settings.tile_rows:
        settings = replace(settings, tile_rows=rows, kv_forward_rows=rows, dkv_rows=rows)
    if dq_rows < settings.dkv_dq_rows:
        settings = replace(settings, dkv_dq_rows=dq_rows)
    if selected_bytes(dq_rows, *sizes, with_dq=True) > shared:
        return replace(settings, forward_limit=math.inf, backward_limit=math.inf)  # the query-major design needs less
    return settings


# A forward pass over at most this many tokens, without a backward pass, is query-major: the host, which launches the
# kernels and list building of the other design, would take longer than the GPU.
_SHORT = 8192


@lru_cache(maxsize=64)
def without_backward(settings: SelectedSettings, tokens: int) -> SelectedSettings:
    """Settings of a forward pass that no backward follows, so that inverted lists are only built if it reads them."""
    limit = math.inf if tokens <= _SHORT else settings.forward_limit
    return replace(settings, forward_limit=limit, backward_limit=math.inf)


def selected_bytes(rows: int, dk: int, dv: int, dtype: torch.dtype, select_block: int, *, with_dq: bool = False) -> int:
    """Upper bound on the shared memory of the selected branch's backward, which takes the most: queries and their
    gradients, a block's keys and values, scores in float32 and, `with_dq`, dQ in float32 (KV-major design)."""
    tiles = (rows + select_block) * (padded(dk) + padded(dv)) * dtype.itemsize
    return tiles + rows * select_block * 4 + with_dq * rows * padded(dk) * 4


# ------------------------------------------------------------ decode

# Launches of a decode step overlap (programmatic dependent launch, decode/common.py) up to this many pairs of a row and
# a KV head. With 32 pairs and more, programs placed early spread unevenly over the multiprocessors and cost time.
PDL_ENABLED = True
PDL_MOST_PAIRS = 8


def overlap_launches(x: Tensor, pairs: int) -> bool:
    """Whether the launches of a decode step overlap."""
    return PDL_ENABLED and pairs <= PDL_MOST_PAIRS and generation(x) >= 9


# ------------------------------------------------------------ devices and limits


def generation(x: Tensor) -> int:
    """Major compute capability; 0 in Triton's interpreter."""
    return capability(x.device)[0] if x.is_cuda else 0


def shared_memory(device: torch.device) -> int:
    """Bytes that one program may use. The interpreter has Hopper's limit, so that it rejects what Hopper would."""
    if device.type != "cuda":
        return HOPPER_SHARED
    return _shared_memory(torch.cuda.current_device() if device.index is None else device.index)


shared_memory._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in tercet.attention.hardware


@lru_cache(maxsize=64)
def _shared_memory(device: int) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def too_large(shared: int, dtype: torch.dtype, dk: int, dv: int, select_block: int) -> str | None:
    """Why the smallest tiles of these sizes exceed the shared memory of one program; None if they fit."""
    name = str(dtype).removeprefix("torch.")
    needed = selected_bytes(FEWEST_ROWS, dk, dv, dtype, min(select_block, LARGEST_BLOCK))
    if needed <= shared:
        return None
    return (
        f"a block of select_block={select_block} with Dk={dk}, Dv={dv} in {name} takes {needed // 1024} KiB of shared "
        f"memory, and this GPU has {shared // 1024}"
    )
