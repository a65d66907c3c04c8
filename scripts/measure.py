"""Measure everything that docs/performance.md shows, on this machine's GPU, in at most ten minutes.

    python scripts/measure.py docs/results/performance

Writes one JSON file per part, each with date, device and versions. Parts run in order of importance, each in its own
process with a time limit; results are saved after every row, so a part that is cut off keeps its finished rows and is
marked incomplete. Before timing, worker processes compile all kernels in parallel. `--quick` runs every part at toy
sizes on a CPU, to test this script.

    operator  forward and forward + backward of the operator against dense (cuDNN), random and smooth inputs
    train     whole training steps of m7c and its dense baseline, 2k to 64k
    decode    one decode step (attention alone and the whole m7c), batch 1 and 16
    growth    the operator from 8k to 1M tokens
    kernels   which kernels the time of a training step and of the operator goes to
    batches   small batches of m7c, with and without a CUDA graph
    million   one training step on 1,048,576 tokens
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

LENGTHS = (2048, 8192, 65536, 4096, 16384, 32768)
CORRELATION = 0.996
ROOT = Path(__file__).resolve().parents[1]


class Part(NamedTuple):
    measure: Callable[[bool], Iterator[dict[str, Any]]]
    seconds: float  # time limit


class Warmup(NamedTuple):
    name: str
    gib: float  # device memory it needs
    argv: list[str]


# Parts. Each yields result rows; `quick` selects toy sizes.


def operator(quick: bool) -> Iterator[dict[str, Any]]:
    shapes = ("P64k", "C8x2k", "P8k", "C1x16k", "C4x4k", "P16k", "P32k", "M4x4k")
    yield from _attention(shapes if not quick else _toy_shapes(), ("random", "smooth"), quick, graph=True)


def growth(quick: bool) -> Iterator[dict[str, Any]]:
    shapes = [f"C1x{n}k" for n in (8, 16, 32, 64, 128, 256, 512, 1024)]
    yield from _attention(shapes if not quick else _toy_shapes(), ("random",), quick, graph=False, dense_limit=131072)


def _attention(
    shapes: Any, kinds: tuple[str, ...], quick: bool, *, graph: bool, dense_limit: int = 65536
) -> Iterator[dict[str, Any]]:
    """Rows of `tercet bench attention`, all shapes with one kind of inputs before the next kind."""
    import torch

    from tercet.attention.config import NSAConfig
    from tercet.bench import attention

    torch.autograd.set_multithreading_enabled(False)  # as in `tercet bench attention`
    options = argparse.Namespace(
        correlation=CORRELATION, rows=8, budget=0.25, profile=False, graph=graph, dense_limit=dense_limit,
        dense="math" if quick else "cudnn",
    )  # fmt: skip
    dense: dict[str, dict[str, Any] | None] = {}
    _raise_clocks()
    for kind in kinds:
        for name in shapes:
            row = attention.bench(name, kind, NSAConfig(), options, dense.get(name))
            row["tokens"] = attention.SHAPES[name].T
            dense[name] = {k: v for k, v in row.items() if k.startswith(("cudnn_", "math_"))} or None
            yield row
            _free()


def _toy_shapes() -> list[str]:
    """Register shapes small enough for a CPU."""
    from tercet.bench.attention import SHAPES, Shape

    toys = {"C8x2k": Shape(1, 256, 4, 2, 32), "P8k": Shape(1, 320, 4, 1, 32)}
    SHAPES.update(toys)
    return list(toys)


def train(quick: bool) -> Iterator[dict[str, Any]]:
    yield from _steps(train_cells(quick), steps=2 if quick else 5, repeats=1 if quick else 3, check=True)


def train_cells(quick: bool) -> list[dict[str, Any]]:
    from tercet.bench.train import cells_of

    preset, lengths, tokens = ("tiny", (64, 128), 128) if quick else ("m7c", LENGTHS, 65536)
    flags = {"run.device": "cpu", "model.layers": 1} if quick else {}
    cells = cells_of(preset, ("nsa", "dense"), lengths, tokens, (), 2048, "none", ("nsa",))
    return [cell | {"flags": flags, "statistics": False} for cell in cells]


def batches(quick: bool) -> Iterator[dict[str, Any]]:
    yield from _steps(batch_cells(quick), steps=2 if quick else 8, repeats=1 if quick else 3, check=False)


def batch_cells(quick: bool) -> list[dict[str, Any]]:
    """Few sequences per step, where launching kernels takes longer than running them."""
    from tercet.bench.train import cells_of

    preset, length, sizes = ("tiny", 64, (1,)) if quick else ("m7c", 2048, (1, 8))
    cells = cells_of(preset, ("nsa",), (), length, sizes, length, "none", ("nsa",))
    graphs = ("off",) if quick else ("off", "on")
    device = {"run.device": "cpu"} if quick else {}
    return [c | {"flags": {"train.cuda_graph": g} | device, "statistics": False} for c in cells for g in graphs]


def million(quick: bool) -> Iterator[dict[str, Any]]:
    from tercet.bench.train import cells_of

    length = 256 if quick else 1 << 20
    (cell,) = cells_of("tiny" if quick else "m7c", ("nsa",), (length,), length, (), 2048, "full", ())
    flags = {"train.compile": "off"} | ({"run.device": "cpu"} if quick else {})
    yield from _steps([cell | {"flags": flags, "statistics": False}], steps=1, repeats=0, check=False)


def _steps(cells: list[dict[str, Any]], *, steps: int, repeats: int, check: bool) -> Iterator[dict[str, Any]]:
    """Cells of `tercet bench train`, each as soon as it is measured; the kernel check comes first."""
    import queue
    import threading

    from tercet.bench.train import measured

    parity = [cells[0]["preset"], cells[0]["flags"], True] if check else None
    lines: queue.Queue[dict[str, Any] | Exception | None] = queue.Queue()

    def run() -> None:
        try:
            measured(cells, steps, repeats, 300, parity, on_line=lines.put)
            lines.put(None)
        except Exception as error:
            lines.put(error)

    threading.Thread(target=run, daemon=True).start()
    while (line := lines.get()) is not None:
        if isinstance(line, Exception):
            raise line
        yield line


def decode(quick: bool) -> Iterator[dict[str, Any]]:
    from tercet.bench.decode import HEADS, attention_rows
    from tercet.bench.decode_model import model_rows

    contexts = (96,) if quick else (65536, 2048, 16384)
    for context in () if quick else contexts:
        for row in attention_rows(HEADS["P"], [1, 16], [context], profile=False):
            yield {"of": "attention", **row}
            _free()
    for context in contexts:
        for row in model_rows("tiny" if quick else "m7c", [1, 16], [context], 8 if quick else 32):
            yield {"of": "model", **row}


def kernels(quick: bool) -> Iterator[dict[str, Any]]:
    """Profiles: training steps of m7c and its dense baseline, then the operator at P 64k."""
    if quick:
        return  # kernel times need a GPU
    import torch

    from tercet.attention.config import NSAConfig
    from tercet.attention.functional import nsa_attention
    from tercet.bench import attention
    from tercet.bench.timing import profile
    from tercet.bench.train_cell import kernel_times

    wanted = {(cell["length"], cell["kind"]): cell for cell in train_cells(quick)}
    for length in (8192, 2048, 65536):
        for kind in ("nsa", "dense"):
            yield {"of": "step", "kind": kind, "length": length, "kernels": kernel_times(wanted[length, kind])}
            _free()
    for kind in ("random", "smooth"):
        x = attention.make_inputs(attention.SHAPES["P64k"], NSAConfig(), kind, CORRELATION)
        leaves = [t.requires_grad_() for t in x.all()]
        dout = torch.randn_like(x.q)

        def both(leaves: list[torch.Tensor] = leaves, dout: torch.Tensor = dout) -> Any:
            return torch.autograd.grad(nsa_attention(*leaves, config=NSAConfig()), leaves, dout)

        found = [{"kernel": name, "ms": ms, "launches": n} for ms, n, name in profile(both)]
        yield {"of": "operator", "shape": "P64k", "inputs": kind, "kernels": found}
        _free()


def _raise_clocks() -> None:
    """Keep the GPU busy for a second, so that the first row is not timed at idle clocks."""
    import torch

    if torch.cuda.is_available():
        x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        started = time.time()
        while time.time() - started < 1:
            for _ in range(20):
                x @ x
            torch.cuda.synchronize()


def _free() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


PARTS = {
    "operator": Part(operator, 130),
    "train": Part(train, 170),
    "decode": Part(decode, 90),
    "growth": Part(growth, 80),
    "kernels": Part(kernels, 70),
    "batches": Part(batches, 50),
    "million": Part(million, 80),
}


# Compiling in parallel


def warmups() -> list[Warmup]:
    """Jobs that fill Triton's and Inductor's caches, slowest first."""
    script = [sys.executable, str(Path(__file__).resolve()), ".", "--compile"]
    jobs = [Warmup(f"operator {name}", gib, [*script, name]) for name, gib in (
        ("P64k", 14.0), ("P32k", 8.0), ("P16k,P8k", 5.0), ("C8x2k,C4x4k", 3.0), ("C1x16k,C1x8k,C1x32k", 4.0),
        ("C1x64k,C1x128k", 6.0), ("C1x256k,C1x512k,C1x1024k", 20.0), ("M4x4k", 3.0),
    )]  # fmt: skip
    jobs += [Warmup("decode", 30.0, [*script, "decode"]), Warmup("decode model", 8.0, [*script, "model"])]
    # Other lengths use the same kernels, or compile within seconds.
    wanted = {("nsa", 2048), ("nsa", 4096), ("nsa", 8192), ("nsa", 65536), ("dense", 2048), ("dense", 65536)}
    cells = [cell for cell in train_cells(False) if (cell["kind"], cell["length"]) in wanted]
    for cell in (*cells, batch_cells(False)[0]):
        argv = [sys.executable, "-m", "tercet.bench.train_cell"]
        asked = json.dumps({"cells": [cell], "steps": 1, "repeats": 0})
        gib = 25.0 * cell["batch"] * cell["length"] / 65536 + 2
        jobs.append(Warmup(f"{cell['kind']} {cell['batch']} x {cell['length']}", gib, [*argv, asked]))
    return sorted(jobs, key=lambda job: not job.name.startswith("nsa"))


def compile_shapes(names: str) -> None:
    """Run what a part will time, once: a list of shapes, `decode` or `model`."""
    import torch

    from tercet.attention.config import NSAConfig
    from tercet.attention.functional import nsa_attention
    from tercet.bench import attention

    if names == "decode":
        from tercet.bench.decode import HEADS, attention_rows

        attention_rows(HEADS["P"], [1, 16], [2048, 16384, 65536], profile=False)
    elif names == "model":
        from tercet.bench.decode_model import model_rows

        model_rows("m7c", [1, 16], [2048, 16384, 65536], 4)
    else:
        for name in names.split(","):
            shape = attention.SHAPES[name]
            for tokens, batch in ((shape.T, shape.B), (min(shape.T, 4096), 1)):
                small = attention.Shape(batch, tokens, shape.H, shape.G, shape.D)
                leaves = [t.requires_grad_() for t in attention.make_inputs(small, NSAConfig(), "random", 0.0).all()]
                out, _ = nsa_attention(*leaves, config=NSAConfig(), return_aux=True)
                torch.autograd.grad(out, leaves, torch.randn_like(out))
                torch.cuda.synchronize()


def warm_up(about: dict[str, Any], limit: float) -> None:
    """Run all warm-up jobs, as many at a time as cores and device memory allow, for at most `limit` seconds."""
    started, waiting = time.time(), warmups()
    running: dict[subprocess.Popen[Any], Warmup] = {}
    errors: dict[subprocess.Popen[Any], IO[str]] = {}
    total, room = len(waiting), about["memory_gib"] - 8
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    while waiting or running:
        for process, job in list(running.items()):
            if process.poll() is not None:
                del running[process]
                note = "" if process.returncode == 0 else f" FAILED: {_last_line(errors.pop(process))}"
                print(f"{time.time() - started:6.1f} s  compiled {job.name}{note}", flush=True)
        for job in list(waiting):
            used = sum(other.gib for other in running.values())
            if len(running) < (os.cpu_count() or 1) and (used + job.gib <= room or not running):
                waiting.remove(job)
                stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 closed with the process object
                pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": stderr}
                process = subprocess.Popen(job.argv, env=env, start_new_session=True, **pipes)
                running[process], errors[process] = job, stderr
        if time.time() - started > limit:
            for process in running:
                _stop(process)
            print(f"warm-up stopped after {limit:.0f} s: {len(waiting) + len(running)} of {total} jobs left")
            return
        time.sleep(0.1)
    print(f"warm-up: {time.time() - started:.0f} s for {total} jobs", flush=True)


def _last_line(stderr: IO[str]) -> str:
    stderr.seek(0)
    return (stderr.read().strip().splitlines() or ["no error message"])[-1][:200]


def _stop(process: subprocess.Popen[Any]) -> None:
    """End a process with its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=5)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


# Running the parts


def describe() -> dict[str, Any]:
    """Date, device and versions, for every result file."""
    import torch

    import tercet

    cuda = torch.cuda.is_available()
    try:
        import triton

        triton_version: str | None = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "memory_gib": torch.cuda.get_device_properties(0).total_memory / 2**30 if cuda else 0.0,
        "torch": torch.__version__, "triton": triton_version, "python": platform.python_version(),
        "tercet": tercet.__version__, "commit": _commit(),
    }  # fmt: skip


def _commit() -> str | None:
    try:
        found = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return found.stdout.strip() or None


def run_part(name: str, out: Path, quick: bool, about: dict[str, Any]) -> None:
    """Measure one part in this process, saving after every row."""
    started = time.time()
    result = {"part": name, **about, "quick": quick, "complete": False, "seconds": 0.0, "results": []}
    for row in PARTS[name].measure(quick):
        result["results"].append(row)
        _save(result, out / f"{name}.json", started)
    result["complete"] = True
    _save(result, out / f"{name}.json", started)


def _save(result: dict[str, Any], path: Path, started: float) -> None:
    result["seconds"] = round(time.time() - started, 1)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path, help="folder for the result files")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; default: all")
    parser.add_argument("--seconds", type=float, default=575, help="time limit for everything")
    parser.add_argument("--warm", type=float, default=150, help="time limit for compiling in advance")
    parser.add_argument("--quick", action="store_true", help="toy sizes on a CPU, to test this script")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # subprocess: measure this part
    parser.add_argument("--about", help=argparse.SUPPRESS)
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # subprocess: compile these shapes
    args = parser.parse_args()
    if args.compile:
        compile_shapes(args.compile)
        return 0
    if args.part:
        run_part(args.part, args.out, args.quick, json.loads(args.about))
        return 0
    names = args.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--parts {unknown[0]} is unknown: pick from {', '.join(PARTS)}")
    started = time.time()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # many processes compile at once
    args.out.mkdir(parents=True, exist_ok=True)
    # In a subprocess: a CUDA context here would take memory from the parts.
    script = [sys.executable, str(Path(__file__).resolve())]
    code = f"import sys, json; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import measure; "
    code += "print(json.dumps(measure.describe()))"
    about = json.loads(
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    )
    print(f"{about['device']}, torch {about['torch']}, triton {about['triton']}, tercet {about['tercet']}", flush=True)
    if about["device"] == "CPU" and not args.quick:
        parser.error("no CUDA device is visible: run this on a machine with a GPU, or add --quick for a dry run")
    if not args.quick and args.warm > 0:
        warm_up(about, args.warm)
    outcomes, complete = [], True
    for name in names:
        left = args.seconds - (time.time() - started)
        limit = min(PARTS[name].seconds, left) if not args.quick else 600
        file = args.out / f"{name}.json"
        file.unlink(missing_ok=True)  # never mix results of two runs
        if limit < 10:
            outcomes.append(f"{name:9} skipped: no time left")
            complete = False
            continue
        part_started = time.time()
        argv = [*script, str(args.out), "--part", name, "--about", json.dumps(about), *(["--quick"] * args.quick)]
        process = subprocess.Popen(argv, start_new_session=True)
        try:
            reason = f"exit code {process.wait(timeout=limit)}"
        except subprocess.TimeoutExpired:
            _stop(process)
            reason = f"stopped at its limit of {limit:.0f} s"
        saved = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"results": [], "complete": False}
        state = "complete" if saved["complete"] else f"INCOMPLETE ({reason})"
        complete &= saved["complete"]
        outcomes.append(f"{name:9} {len(saved['results']):3d} rows, {time.time() - part_started:5.0f} s, {state}")
        print(outcomes[-1], flush=True)
    print(f"\n{time.time() - started:.0f} s in all; results in {args.out}", *outcomes, sep="\n")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
