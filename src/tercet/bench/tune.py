"""Finds launch parameters for this GPU: times every kernel of the compressed and window branches over candidates, in
CUDA graphs, and prints the rows to add to `attention/kernels/settings.py`. A candidate whose result differs from the
shipped setting's is left out.

    python -m tercet.bench.tune --shapes P64k,C1x16k
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tercet.attention.kernels.compressed import forward as compressed_forward
from tercet.attention.kernels.compressed import key_gradients as compressed_key_gradients
from tercet.attention.kernels.documents import Documents
from tercet.attention.kernels.query_gradient import query_gradients
from tercet.attention.kernels.score import select
from tercet.attention.kernels.settings import Launch, settings
from tercet.attention.kernels.window import forward as window_forward
from tercet.attention.kernels.window import key_gradients as window_key_gradients
from tercet.attention.spec import NSAConfig
from tercet.bench.attention import SHAPES, Shape, graphed, make_inputs, milliseconds, relative_error

# rows, keys, warps, stages: what was worth trying on the H200
CANDIDATES: dict[str, list[Launch]] = {
    "compressed_forward": [
        Launch(rows, keys, warps, stages, tma)
        for rows, keys, warps in ((64, 64, 4), (128, 64, 4), (128, 64, 8), (64, 128, 4), (128, 128, 8))
        for stages in (2, 3)
        for tma in (True, False)
    ],
    "score": [
        Launch(rows, 64, warps, stages, tma)
        for rows, warps in ((64, 4), (128, 4), (128, 8))
        for stages in (2, 3)
        for tma in (True, False)
    ],
    "query_gradient": [
        Launch(rows, keys, warps, stages, tma, 16, registers)
        for rows, keys, warps in ((64, 64, 4), (64, 128, 4), (64, 32, 4), (128, 64, 8))
        for stages in (2, 3)
        for tma in (True, False)
        for registers in ((0, 168, 128) if rows * keys <= 4096 else (0,))
    ],
    "compressed_key_gradients": [
        Launch(rows, keys, 4, stages, tma, parts, registers)
        for rows, keys, stages in ((64, 64, 2), (64, 64, 3), (32, 64, 3), (32, 64, 4), (32, 128, 3))
        for tma in (True, False)
        for parts in (16, 48)
        for registers in (0, 168, 128)
    ],
}
CANDIDATES["window_forward"] = CANDIDATES["compressed_forward"]
CANDIDATES["window_key_gradients"] = [s for s in CANDIDATES["compressed_key_gradients"] if s.parts == 16]


def calls(shape: Shape, config: NSAConfig) -> dict[str, Callable[[Launch | None], tuple[Tensor, ...]]]:
    """Each kernel on random inputs of a shape, as a function of its launch parameters."""
    x = make_inputs(shape, config, "random", 0.0)
    documents = Documents(shape.B, shape.T, x.kc.shape[1], None, None)
    dout = torch.randn_like(x.q)
    lse = torch.full(x.q.shape[:3], 12.0, device=x.q.device)
    row_sum = torch.randn(x.q.shape[:3], device=x.q.device)
    gate = torch.rand(x.q.shape[:3], device=x.q.device)
    compressed = (x.kc, x.vc, lse, row_sum, gate)
    window = (x.kw, x.vw, lse, row_sum, gate)
    return {
        "compressed_forward": lambda s: compressed_forward(x.q, x.kc, x.vc, config, documents, s),
        "score": lambda s: (select(x.q, x.kc, lse, config, documents, s),),
        "query_gradient": lambda s: (query_gradients(x.q, dout, compressed, window, config, documents, s),),
        "compressed_key_gradients": lambda s: compressed_key_gradients(
            x.q, x.kc, x.vc, lse, dout, gate, row_sum, config, documents, s
        ),
        "window_forward": lambda s: window_forward(x.q, x.kw, x.vw, config.window, documents, s),
        "window_key_gradients": lambda s: window_key_gradients(
            x.q, x.kw, x.vw, lse, dout, gate, row_sum, config.window, documents, s
        ),
    }


def tune(name: str, kernels: Sequence[str], config: NSAConfig, share: tuple[int, int] | None) -> list[dict[str, Any]]:
    found = []
    shape = SHAPES[name]
    every = calls(shape, config)
    place = 0
    for kernel in kernels:
        call = every[kernel]
        shipped = settings(
            kernel, torch.empty(1, shape.D, device="cuda", dtype=torch.bfloat16), torch.empty(1, shape.D)
        )
        wanted = call(None) if share is None else None
        for launch in dict.fromkeys([shipped, *CANDIDATES[kernel]]):
            place += 1
            if share is not None and place % share[1] != share[0]:
                continue
            row: dict[str, Any] = {"kernel": kernel, "shape": name, "launch": repr(launch)}
            try:
                got: tuple[Tensor, ...] | None = call(launch)
                if wanted is not None:
                    row["shipped"] = launch == shipped
                    row["error"] = max(
                        relative_error(g[w.isfinite()], w[w.isfinite()]) for g, w in zip(got or (), wanted, strict=True)
                    )
                    row["ms"] = milliseconds(graphed(partial(call, launch)), 0.05)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
            got = None
            found.append(row)
        torch.cuda.empty_cache()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tercet bench tune", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shapes", default="P64k,C1x16k", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--kernels", default=",".join(CANDIDATES), help=f"of {', '.join(CANDIDATES)}")
    parser.add_argument("--workers", type=int, default=8, help="processes that fill Triton's cache before timing")
    parser.add_argument("--share", help=argparse.SUPPRESS)  # "i/n": this process only compiles its share
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("tercet bench tune needs a CUDA device: none is visible", file=sys.stderr)
        return 2
    names, kernels = args.shapes.split(","), args.kernels.split(",")
    if unknown := [n for n in names if n not in SHAPES] + [k for k in kernels if k not in CANDIDATES]:
        parser.error(f"{unknown[0]!r} is unknown: pick from {', '.join([*SHAPES, *CANDIDATES])}")
    config = NSAConfig()
    if args.share:
        mine, of = map(int, args.share.split("/"))
        for name in names:
            tune(name, kernels, config, (mine, of))
        return 0
    command = [sys.executable, "-m", "tercet.bench.tune", "--shapes", args.shapes, "--kernels", args.kernels, "--share"]
    workers = [subprocess.Popen([*command, f"{i}/{args.workers}"]) for i in range(args.workers)]
    for worker in workers:
        worker.wait()
    rows = [row for name in names for row in tune(name, kernels, config, None)]
    for row in rows:
        outcome = (
            row.get("failed") or f"{row['ms']:8.3f} ms  error {row['error']:.1e}{'  shipped' if row['shipped'] else ''}"
        )
        print(f"{row['shape']:>8} {row['kernel']:<26} {row['launch'].removeprefix('Launch'):<80} {outcome}")
    timed = [row for row in rows if "ms" in row and row["error"] < 1e-2]
    best: list[dict[str, Any]] = []
    for name in names:
        for kernel in kernels:
            here = [row for row in timed if row["kernel"] == kernel and row["shape"] == name]
            if here:
                best.append(min(here, key=lambda row: row["ms"]))
                print(f'("{kernel}", {SHAPES[name].D}): {best[-1]["launch"]},  # {name}: {best[-1]["ms"]:.3f} ms')
    print(json.dumps({"bench": "tune", "device": torch.cuda.get_device_name(), "best": best}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
