"""Measure what docs/performance.md shows, on this machine's GPU, in calls of at most ten minutes.

    python scripts/measure.py docs/results/performance --parts train,decode,decode-model
    python scripts/measure.py docs/results/performance --parts operator,growth,kernels
    python scripts/measure.py docs/results/performance --parts shapes,large,two-branch --warm 200
    python scripts/measure.py docs/results/performance --parts blocks,fp8,batches,million

Writes one JSON file per part, each with date, device and versions. Each part runs in its own process with a time limit;
results are saved after every row, so a part that is cut off keeps its finished rows and is marked incomplete. Before
timing, worker processes compile the kernels of these parts in parallel. `--quick` runs every part at toy sizes on a
CPU, to test this script.

    train     whole training steps of m7c in every mode, 2k to 64k: dense, NSA, two-branch, block-sparse
    operator  forward and forward + backward of the operator against dense (cuDNN): random inputs, blocks that a trained
              model selected in text, smooth inputs
    decode    attention of one decode step, batch 1 and 16
    decode-model  tokens/s and time to the first token of m7c in every mode, batch 1 and 16
    growth    the operator from 8k to 1M tokens
    shapes    the operator over heads, head sizes and odd lengths, to find cells slower than their neighbours
    large     whole training steps of 350m and 1b and their dense baselines, 8k and 64k
    two-branch  the same of 1b at 8k with two branches and learned selectors
    kernels   which kernels the time of a training step and of the operator goes to
    blocks    whole training steps of m7c with selected blocks of 32, 64 and 128 tokens
    fp8       one linear layer at the shapes of 1b in float8 against bf16
    batches   small batches of m7c, with and without a CUDA graph
    million   one training step on 1,048,576 tokens
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from measurements.part import Warmup

ROOT = Path(__file__).resolve().parents[1]


class Part(NamedTuple):
    """Names the part's functions in measurements/. They are imported when needed: with torch, that takes seconds."""

    measure: str  # yields result rows; True: toy sizes
    seconds: float  # time limit
    warmups: str | None = None
    compile: str | None = None  # runs once what a job of compile_job names
    gpu_only: bool = False


PARTS = {
    "train": Part("train.train", 260, "train.warmups"),
    "operator": Part("operator.operator", 160, "operator.operator_warmups", "operator.compile_shapes"),
    "decode": Part("decode.attention", 60, "decode.attention_warmups", "decode.compile_attention", gpu_only=True),
    "decode-model": Part("decode.models", 110, "decode.model_warmups", "decode.compile_model"),
    "growth": Part("operator.growth", 80, "operator.growth_warmups", "operator.compile_shapes"),
    "shapes": Part("shapes.shapes", 200, "shapes.warmups", "shapes.compile_family"),
    "large": Part("steps.large", 250, "steps.large_warmups"),
    "two-branch": Part("steps.two_branch", 90, "steps.two_branch_warmups"),
    "kernels": Part("profiles.kernels", 90, "train.warmups", gpu_only=True),
    "blocks": Part("steps.blocks", 170, "steps.blocks_warmups"),
    "fp8": Part("fp8.fp8", 40, "fp8.warmups", "fp8.compile_casts"),
    "batches": Part("steps.batches", 100, "steps.batches_warmups"),
    "million": Part("steps.million", 80),
}
# what every run should measure
MAIN = ("train", "decode", "decode-model", "operator", "growth", "kernels", "batches", "million")


def imported(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(".")
    return getattr(importlib.import_module(f"measurements.{module}"), attribute)


# Compiling in parallel


def warmups(names: list[str]) -> list[Warmup]:
    """The jobs of these parts, slowest first."""
    given = [imported(part.warmups)() for part in map(PARTS.__getitem__, names) if part.warmups]
    jobs = {tuple(job.argv): job for jobs in given for job in jobs}
    return sorted(jobs.values(), key=lambda job: -job.seconds)


def warm_up(waiting: list[Warmup], about: dict[str, Any], limit: float) -> None:
    """Run warm-up jobs, as many at a time as cores and device memory allow, for at most `limit` seconds."""
    started = time.time()
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
    for row in imported(PARTS[name].measure)(quick):
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
    parser.add_argument("--parts", default=",".join(MAIN), help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=575, help="time limit for everything")
    parser.add_argument("--warm", type=float, default=150, help="time limit for compiling in advance")
    parser.add_argument("--quick", action="store_true", help="toy sizes on a CPU, to test this script")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # subprocess: measure this part
    parser.add_argument("--about", help=argparse.SUPPRESS)
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # subprocess: PART:NAMES, compile these
    args = parser.parse_args()
    if args.compile:
        part, _, what = args.compile.partition(":")
        job = PARTS[part].compile
        assert job is not None, part
        imported(job)(what)
        return 0
    if args.part:
        run_part(args.part, args.out, args.quick, json.loads(args.about))
        return 0
    names = args.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--parts {unknown[0]} is unknown: pick from {', '.join(PARTS)}")
    for file in (args.out / f"{name}.json" for name in names):
        if args.quick and file.exists() and not json.loads(file.read_text(encoding="utf-8")).get("quick"):
            parser.error(f"{file} holds measured results, and --quick would replace them: give another folder")
    print(f"{', '.join(names)}: {'toy sizes' if args.quick else f'at most {args.seconds:.0f} s'}", flush=True)
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
        warm_up(warmups(names), about, args.warm)
    outcomes, complete = [], True
    for name in names:
        left = args.seconds - (time.time() - started)
        limit = min(PARTS[name].seconds, left) if not args.quick else 600
        file = args.out / f"{name}.json"
        file.unlink(missing_ok=True)  # never mix results of two runs
        if args.quick and PARTS[name].gpu_only:
            outcomes.append(f"{name:9} skipped: needs a GPU, and --quick runs on a CPU")
            print(outcomes[-1], flush=True)
            continue
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
