"""Measure what docs/performance.md and the README show, on this machine's GPU.

    python scripts/measure.py docs/results/performance --parts train
    python scripts/measure.py docs/results/performance --parts decode-model,operator
    python scripts/measure.py docs/results/performance --parts large,batches,million

Each part is a list of `tercet bench` calls. Their results go into one JSON file per part, with date, device, versions
and the calls; it is saved after every call, so a part that is cut off keeps what it has. Kernels are compiled first, by
several calls at a time that train for one step.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KINDS = "nsa two-branch block-sparse"
COMPRESSED = "--settings model.selector=compressed"
LENGTHS = (8192, 65536, 2048, 32768, 4096, 16384)  # by importance
STEPS = "--steps 3 --repeats 2"
ONCE = "--steps 1 --repeats 0"
PRESETS = {"1b": 8192, "350m": 8192, "1b-64k": 65536, "350m-64k": 65536}
DECODE = "--contexts 65536 2048 16384 --batches 1 16 --steps 128"
PARTS = {
    "train": [
        call
        for n in LENGTHS
        for call in (
            f"train --lengths {n} --kinds {KINDS} dense --packed {KINDS} dense {STEPS}",
            f"train --lengths {n} --kinds nsa block-sparse dense --packed nsa block-sparse {COMPRESSED} {STEPS}",
        )
    ],
    "decode-model": [
        f"decode --kinds {KINDS} dense {DECODE}",
        f"decode --kinds nsa block-sparse dense {COMPRESSED} {DECODE}",
    ],
    "operator": [
        f"attention --shapes {shape} --dense cudnn --rows 8 --budget 0.25"
        for shape in ("P64k", "C8x2k", "P8k", "C1x16k", "C4x4k", "P16k", "P32k", "M4x4k")
    ],
    "own": ["attention --scorer own --rows 4 --budget 0.15"],
    "large": [
        *(
            f"train --preset {preset} --lengths {n} --kinds nsa dense --packed nsa --steps 2 --repeats 2"
            for preset, n in PRESETS.items()
        ),
        "train --preset 1b --lengths 8192 --kinds two-branch dense --packed two-branch --steps 2 --repeats 2",
    ],
    "batches": [
        f"train --lengths 2048 --tokens {tokens} --kinds nsa --packed nsa --cuda-graph {graph} --steps 8"
        for tokens in (2048, 16384)
        for graph in ("off", "on")
    ],
    "million": [
        "train --lengths 1048576 --tokens 1048576 --kinds nsa --packed nsa --checkpointing full --compile off " + ONCE
    ],
}
WARM_UP = {"train": ONCE, "decode": "--steps 4", "attention": "--budget 0.01"}


def bench(call: str, seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Run `tercet bench CALL`: the rows of its JSON line, and what went wrong."""
    try:
        command = [sys.executable, "-m", "tercet", "bench", *shlex.split(call)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=ROOT)
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return [], f"stopped after {seconds:.0f} s"
    except (IndexError, ValueError):
        return [], (done.stderr.strip().splitlines() or ["no output"])[-1]
    for row in found["results"]:
        if flags := row.pop("flags", None):
            row["cuda_graph"] = flags["train.cuda_graph"]
    return found["results"], "" if done.returncode == 0 else "WRONG: see the rows without a ratio"


def describe() -> dict[str, Any]:
    """Date, device and versions, for every result file. In a subprocess: a CUDA context here would take memory."""
    code = (
        "import json, torch, tercet, importlib.metadata as m; print(json.dumps({'device': torch.cuda.get_device_name(),"
        " 'torch': torch.__version__, 'triton': m.version('triton'), 'tercet': tercet.__version__}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"no GPU, or torch and Triton do not load: {done.stderr.strip().splitlines()[-1]}")
    commit = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return {"date": date, **json.loads(done.stdout), "commit": commit.stdout.strip() or None}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path, help="folder for the result files")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=570, help="time limit for everything")
    parser.add_argument("--at-once", type=int, default=5, help="calls that compile at a time; 0: compile while timing")
    args = parser.parse_args()
    names = args.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--parts {unknown[0]} is unknown: pick from {', '.join(PARTS)}")
    about, end, complete = describe(), time.time() + args.seconds, True
    args.out.mkdir(parents=True, exist_ok=True)
    if args.at_once:
        calls = [f"{call} {WARM_UP[call.split()[0]]}" for name in names if name != "million" for call in PARTS[name]]
        with ThreadPoolExecutor(args.at_once) as pool:
            list(pool.map(lambda call: bench(call, max(1.0, (end - time.time()) / 2)), calls))
        print(f"compiled, {end - time.time():.0f} s left", flush=True)
    for name in names:
        rows: list[dict[str, Any]] = []
        for call in PARTS[name]:
            found, wrong = bench(call, max(1.0, end - time.time()))
            print(f"{name}: {call}: {wrong or f'{len(found)} rows'}", flush=True)
            rows, complete = rows + found, complete and not wrong
            record = json.dumps({"part": name, **about, "calls": PARTS[name]})[:-1] + ', "results": [\n'
            text = record + ",\n".join(map(json.dumps, rows)) + "\n]}\n"
            (args.out / f"{name}.json").write_text(text, encoding="utf-8")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
