"""Search launch settings for this GPU (`tercet bench tune`).

Times candidates for every kernel of the compressed and window branches and for the block scores of a learned selector
in CUDA graphs and prints the rows to add to the kernel table. Candidates whose result differs from the shipped
setting's are skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.kernels import compressed, window
from tercet.attention.kernels.block_scores import select_by_tokens
from tercet.attention.kernels.dq import compressed_window_dq
from tercet.attention.kernels.scores import select
from tercet.attention.kernels.table import Launch, triton_launch
from tercet.attention.kernels.tiles import Branch
from tercet.attention.kernels.varlen import Documents
from tercet.bench.attention import SHAPES, Shape, make_inputs, relative_error
from tercet.bench.timing import graphed, milliseconds
from tercet.errors import TercetError
from tercet.inference.arguments import check_known

SELECTOR_SIZE = 32  # of a learned selector's queries and keys


def _tried(*rows: tuple[int, int, int, int, bool, int]) -> list[Launch]:
    """Candidates from (rows, keys, warps, stages, TMA, registers)."""
    return [Launch(m, n, warps, stages, tma, registers=registers) for m, n, warps, stages, tma, registers in rows]


_FORWARD = _tried(
    (64, 64, 4, 2, True, 0), (64, 64, 4, 3, True, 0), (64, 64, 4, 3, False, 0), (64, 128, 4, 2, True, 0),
    (128, 64, 4, 2, True, 0), (128, 64, 8, 2, True, 128), (128, 64, 8, 3, True, 128), (128, 64, 8, 3, False, 128),
    (128, 128, 8, 2, True, 0),
)  # fmt: skip
_KEY_GRADIENTS = _tried(
    (64, 64, 4, 2, True, 0), (64, 64, 4, 3, True, 0), (64, 64, 4, 2, False, 0), (32, 64, 4, 3, True, 0),
    (32, 64, 4, 3, True, 128), (64, 128, 8, 2, True, 0), (64, 128, 8, 3, True, 0), (32, 128, 8, 3, True, 0),
    (32, 128, 8, 3, True, 128),
)  # fmt: skip
_SCORE = _tried((64, 64, 4, 2, True, 0), (64, 64, 4, 2, True, 128), (64, 64, 4, 2, True, 168), (64, 64, 4, 3, True, 0))
CANDIDATES: dict[str, list[Launch]] = {
    "window_forward": _FORWARD,
    "query_gradient": _tried(
        (64, 64, 4, 2, True, 0), (64, 64, 4, 2, True, 128), (64, 64, 4, 3, True, 128), (64, 128, 4, 2, True, 0),
        (64, 32, 4, 3, True, 128), (128, 64, 8, 2, True, 0), (128, 64, 8, 2, True, 128), (128, 64, 8, 3, True, 128),
    ),
    "window_key_gradients": _KEY_GRADIENTS,
    "compressed_key_gradients": [replace(x, parts=parts) for x in _KEY_GRADIENTS for parts in (16, 48)],
    "compressed_forward": _FORWARD,
    "score": [replace(x, held=held) for x in _SCORE for held in (1, 2, 4, 6)],
    "token_score": _tried(
        (64, 256, 4, 3, True, 0), (64, 256, 4, 2, True, 0), (64, 256, 4, 3, False, 0), (64, 128, 4, 3, True, 0),
        (64, 128, 4, 4, True, 0), (64, 128, 4, 4, True, 128), (128, 128, 4, 3, True, 0), (128, 128, 8, 3, True, 0),
        (128, 256, 8, 3, True, 0), (128, 64, 4, 3, True, 0),
    ),
}  # fmt: skip


def calls(shape: Shape, config: NSAConfig) -> dict[str, Callable[[Launch | None], tuple[Tensor, ...]]]:
    """Each kernel on random inputs, as a function of its launch settings."""
    x = make_inputs(shape, config, "random", 0.0)
    documents = Documents(shape.B, shape.T, x.kc.shape[1], None, None)
    dout = torch.randn_like(x.q)
    planes = (shape.H, shape.B, shape.T)
    lse = torch.full(planes, 12.0, device=x.q.device)
    delta = torch.randn(planes, device=x.q.device)
    gate = torch.rand(planes, device=x.q.device)
    of_compressed = Branch(x.kc, x.vc, lse, delta, gate)
    of_window = Branch(x.kw, x.vw, lse, delta, gate)
    selector = x.q[:, :, : shape.G, :SELECTOR_SIZE].contiguous(), x.ks[..., :SELECTOR_SIZE].contiguous()
    return {
        "compressed_forward": lambda s: compressed.forward(x.q, x.kc, x.vc, config, documents, s),
        "score": lambda s: (select(x.q, x.kc, lse, config, documents, s),),
        "token_score": lambda s: (select_by_tokens(*selector, config, documents, s),),
        "query_gradient": lambda s: (compressed_window_dq(x.q, dout, of_compressed, of_window, config, documents, s),),
        "compressed_key_gradients": lambda s: compressed.dkv(x.q, dout, of_compressed, config, documents, s),
        "window_forward": lambda s: window.forward(x.q, x.kw, x.vw, config.window, documents, s),
        "window_key_gradients": lambda s: window.dkv(x.q, dout, of_window, config.window, documents, s),
    }


def tune(name: str, kernels: Sequence[str], config: NSAConfig, share: tuple[int, int] | None) -> list[dict[str, Any]]:
    found = []
    shape = SHAPES[name]
    every = calls(shape, config)
    place = 0
    for kernel in kernels:
        call = every[kernel]
        size = SELECTOR_SIZE if kernel == "token_score" else shape.D
        shipped = triton_launch(kernel, torch.empty(1, size, device="cuda", dtype=torch.bfloat16), torch.empty(1, size))
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
                    row["ms"] = milliseconds(graphed(partial(call, launch)), 0.03)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
            got = None
            found.append(row)
            if share is None:
                print(_line(row), flush=True)
        torch.cuda.empty_cache()
    return found


def _line(row: dict[str, Any]) -> str:
    outcome = (
        row.get("failed") or f"{row['ms']:8.3f} ms  error {row['error']:.1e}{'  shipped' if row['shipped'] else ''}"
    )
    return f"{row['shape']:>8} {row['kernel']:<26} {row['launch'].removeprefix('Launch'):<80} {outcome}"


def compile_share(names: Sequence[str], kernels: Sequence[str], share: tuple[int, int]) -> None:
    """Compile a share of all candidates, (i, n), into Triton's cache."""
    # Compiled code depends on head count and sizes, not on the number of tokens.
    alike = {(SHAPES[n].H, SHAPES[n].G, SHAPES[n].D): n for n in reversed(names)}
    for name in alike.values():
        tune(name, kernels, NSAConfig(), share)


def main(names: Sequence[str], kernels: Sequence[str], processes: int) -> int:
    """names: of attention.SHAPES. processes: how many compile before timing starts."""
    check_known("--shapes", names, SHAPES)
    check_known("--kernels", kernels, CANDIDATES)
    if not torch.cuda.is_available():
        raise TercetError("tercet bench tune needs a CUDA device and none is visible")
    command = [sys.executable, "-m", "tercet.bench.tune", ",".join(names), ",".join(kernels)]
    workers = [subprocess.Popen([*command, str(i), str(processes)]) for i in range(processes)]
    for worker in workers:
        worker.wait()
    rows = [row for name in names for row in tune(name, kernels, NSAConfig(), None)]
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
    compile_share(sys.argv[1].split(","), sys.argv[2].split(","), (int(sys.argv[3]), int(sys.argv[4])))
