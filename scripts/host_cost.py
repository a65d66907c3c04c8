"""Measure the host time of one layer's operators without a GPU: launches are stubs, the Python code is the real one.

    python scripts/host_cost.py [--tokens 65536] [--document 2048] [--plain | --unbounded]

Prints for each operator (m7c's heads, bf16, Hopper settings) its launches, the microseconds of a replay, if it has one
(kernels/replay.py: not with packed documents), and of a call without, and the functions that take most of the latter.
Times are the least of many calls; tensors have no memory. Excludes Triton's launcher, the driver, Inductor's wrapper
and ATen kernels. Shares carry over to other machines, microseconds do not.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import timeit
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tercet.attention.config import NSAConfig
from tercet.attention.kernels import ops, qkv_split, replay, table
from tercet.attention.layout import Packing
from tercet.model import swiglu

H, G, D, FFN = 12, 2, 64, 2048
CALLS, REPEATS = 20, 300
launched: list[str] = []


class Stub:
    """Stands in for a compiled kernel and for the driver of a GPU."""

    function = packed_metadata = None

    def __init__(self, name: str = "") -> None:
        self.name = name

    def run(self, *args: Any) -> None:
        launched.append(self.name)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_nothing(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Stub:
    launched.append(self.fn.__name__)
    return Stub(self.fn.__name__)


def measured(name: str, call: Callable[[], Any]) -> None:
    times = []
    replay.forget_tapes()
    for replays in (True, False):
        replay.can_replay = lambda x, replays=replays: replays  # type: ignore[assignment, misc]
        call()
        times.append(min(timeit.repeat(call, number=1, repeat=REPEATS)) * 1e6)
    launched.clear()
    call()
    launches, own = len(launched), profiled(call)
    most = sorted(own.items(), key=lambda item: -item[1])[:3]
    first = ", ".join(f"{function} {100 * seconds / sum(own.values()):.0f}%" for function, seconds in most)
    replayed = f"replayed {times[0]:5.0f} us, else" if any(replay._tapes.values()) else "not replayed,"
    print(f"{name:16} {launches:3d} launches, {replayed} {times[1]:5.0f} us: {first}")


def profiled(call: Callable[[], Any]) -> dict[str, float]:
    """Seconds by function of Tercet."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(CALLS):
        call()
    profile.disable()
    stats = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    return {
        f"{file.rsplit('/', 1)[-1]}:{function}": total
        for (file, _, function), (_, _, total, _, _) in stats
        if "tercet" in file
    }


def dispatcher() -> None:
    x = torch.zeros(1, dtype=torch.int32, device="cpu")
    plain = torch.library.Library("host_cost", "DEF")
    plain.define("same(Tensor x) -> Tensor")
    plain.impl("same", lambda x: x.clone(), "CompositeExplicitAutograd")

    def each(call: Callable[[], Any]) -> float:
        return min(timeit.repeat(call, number=2000, repeat=5)) / 2000 * 1e6

    with torch.no_grad():
        base = each(x.clone)
        custom = each(lambda: torch.ops.tercet.keep_selection.default(x)) - base
        cheap = each(lambda: torch.ops.host_cost.same.default(x)) - base
    print(f"dispatcher overhead: {custom:.0f} us for a custom_op, {cheap:.0f} us for a plain operator")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--document", type=int, default=2048)
    parser.add_argument("--plain", action="store_true", help="one row per document instead of one packed row")
    parser.add_argument("--unbounded", action="store_true", help="do not pass max_seqlen")
    a = parser.parse_args()
    JITFunction.run = compile_nothing  # type: ignore[method-assign, assignment]
    table.generation = lambda x: 9  # type: ignore[assignment]
    table.shared_memory = lambda device: 227 * 1024  # type: ignore[assignment]
    driver.set_active(Stub())
    config = NSAConfig()
    B, T = (a.tokens // a.document, a.document) if a.plain else (1, a.tokens)
    none = [None] * 4
    numbers = (list(astuple(config)), [], None if a.plain or a.unbounded else a.document)
    cu = None if a.plain else torch.arange(0, a.tokens + 1, a.document, dtype=torch.int32)
    packing = None if cu is None else Packing(cu, T, T // 16, config)
    ccu = None if packing is None else packing.compressed_cu_seqlens
    maps = none if packing is None else list(packing.tokens_to_chunks)
    cu, ccu, *maps = (None if x is None else x.to("meta") for x in (cu, ccu, *maps))
    empty = partial(torch.empty, device="meta")

    def tensor(tokens: int, n: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return empty(B, tokens, n, D, dtype=dtype)

    q, gates = tensor(T, H), empty(B, T, H, 3)
    kc = vc = tensor(T // 16 if packing else config.num_compressed(T), G)
    ks = vs = kw = vw = tensor(T, G)
    y, cos = empty(B, T, qkv_split.columns(H, G, D, 3), dtype=torch.bfloat16), empty(T, 1, D // 2)
    split = [H, G, D, 16, 3]
    parts = qkv_split.heads_apart(y, cos, cos, *maps[:2], split)
    lse = empty(H, B, T)
    blocks = empty(B, T, G, config.select_count, dtype=torch.int32)
    inputs = (q, kc, vc, ks, vs, kw, vw, gates, q, lse, blocks, cu, ccu, *numbers)
    _, o_s, lse_s, o_w, lse_w, *saved = ops.nsa_attend._init_fn(*inputs)
    sums, planes, *_ = ops.nsa_delta(q, gates, q, o_s, o_w)
    kept = (q, kc, vc, ks, vs, kw, vw, gates, None, lse, None, lse_s, None, lse_w, blocks, cu, ccu)
    wide = empty(a.tokens, 2 * FFN, dtype=torch.bfloat16)
    print(f"{B} rows of {T} tokens, documents of {a.document}; torch {torch.__version__}")
    for name, call in (
        ("heads_apart", lambda: qkv_split.heads_apart(y, cos, cos, *maps[:2], split)),
        ("nsa_compressed", lambda: ops.nsa_compressed(q, kc, vc, cu, ccu, *numbers)),
        ("nsa_select", lambda: ops.nsa_select(q, kc, lse, cu, ccu, *numbers)),
        ("nsa_attend", lambda: ops.nsa_attend._init_fn(*inputs)),
        ("swiglu_gradient", lambda: swiglu.swiglu_gradient._init_fn(wide, wide[:, :FFN])),
        ("nsa_delta", lambda: ops.nsa_delta(q, gates, q, o_s, o_w)),
        ("nsa_backward", lambda: ops.nsa_backward(q, *kept, saved, *numbers, sums, planes)),
        ("heads_together", lambda: qkv_split.heads_together(parts, cos, cos, *maps[2:], split)),
    ):
        measured(name, call)
    dispatcher()


if __name__ == "__main__":
    main()
