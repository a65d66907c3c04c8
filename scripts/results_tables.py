"""Generate the tables of the results pages from the committed result files.

    python scripts/results_tables.py             # rewrite every table between its markers
    python scripts/results_tables.py --check     # exit code 1 if a page is out of date
    python scripts/results_tables.py NSA=runs/perplexity-nsa.txt dense=runs/perplexity-dense.txt
                                                 # print one table for your own runs; the last one is the baseline

A page marks a table with `<!-- table:NAME -->` and `<!-- /table -->`; TABLES below maps each name to a function. The
last form accepts what `tercet eval perplexity` and `tercet eval needle` print, and a run's `val.csv` and `layers.csv`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conversion_tables
import evidence_tables
import retrieval_tables
import settings_tables
from result_files import (
    MARKED,
    RESULTS,
    ROOT,
    Records,
    by_context,
    by_step,
    fill,
    gate_shares,
    needles,
    read_csv,
    read_eval,
    span,
    table,
)

DOCS = ROOT / "docs"


# The table of docs/configuration.md


def config_sections() -> str:
    """Sections of the configuration, with the first sentence of their docstrings."""
    from tercet.config.help import about_table, table_names
    from tercet.config.keys import all_keys

    rows = [(f"`{name}`", about_table(name).partition(". ")[0].rstrip(".")) for name in table_names(all_keys())]
    return table(["section", "contents"], rows)


# Tables of docs/nsa.md


def keys_per_query() -> str:
    """Keys that the last query of a sequence reads, by SPEC's formulas, with the operator's defaults."""
    compress_block, stride, block, count, window = 32, 16, 64, 16, 512
    rows = []
    for tokens in (2048, 8192, 65_536, 1_048_576):
        compressed = (tokens - compress_block) // stride + 1
        selected = min(count * block, tokens)
        total = compressed + selected + min(window, tokens)
        numbers = (tokens, compressed, selected, min(window, tokens), total)
        rows.append([*(f"{number:,}" for number in numbers), f"{tokens / total:.1f}×"])
    return table(["sequence", "compressed", "selected", "window", "keys read", "fewer than dense"], rows)


def recall() -> str:
    """Correct answers by distance, with all branches and with the window alone."""
    runs = [run["by_distance"] for run in read_eval(RESULTS / "recall" / "small-64.txt")["runs"]]
    rows = [
        [span(bins[0]["first"], bins[0]["last"]), *(f"{one['accuracy']:.1%} of {one['asked']}" for one in bins)]
        for bins in zip(*runs, strict=True)
    ]
    return table(["tokens back", "NSA", "window only"], rows)


# Tables of docs/gpus.md. The plans are those of `tercet plan`.

PLANNED_RUNS = (  # preset, seq_len
    ("m7c", 2048),
    ("m7c", 8192),
    ("m7c-gpt2", 4096),
    ("m7c-64k", 65_536),
    ("m7c-64k", 262_144),
    ("m7c-64k", 1_048_576),
    ("350m", 8192),
    ("350m-64k", 65_536),
    ("1b", 8192),
    ("1b-64k", 65_536),
)
STEP_TOKENS = 65_536  # tokens per pass; a longer sequence is a pass by itself


def _planned_gib(preset: str, length: int, batch: int, checkpointing: str, gpu: str) -> tuple[float, bool]:
    """GiB of a step, and whether it fits."""
    from tercet.config.load import load
    from tercet.plan import find_device, make_plan

    flags = {
        "data.seq_len": length,
        "train.micro_batch": batch,
        "train.tokens_per_step": max(STEP_TOKENS, length),
        "train.activation_checkpointing": checkpointing,
    }
    plan = make_plan(load(preset, flags=flags).config, find_device("auto", gpu))
    return plan.memory.total / 2**30, bool(plan.fits)


def gpu_plans(gpu: str) -> str:
    """The largest micro-batch that fits, and its memory, by preset, length and activation checkpointing."""
    modes = ("none", "selective", "full")

    def cell(preset: str, length: int, mode: str) -> str:
        batch = max(1, STEP_TOKENS // length)
        while batch:
            gib, fit = _planned_gib(preset, length, batch, mode, gpu)
            if fit:
                return f"{batch} ({gib:.1f} GiB)"
            batch //= 2
        return "does not fit"

    rows = [
        [f"`{preset}`", f"{length:,}", *(cell(preset, length, mode) for mode in modes)]
        for preset, length in PLANNED_RUNS
    ]
    return table(["preset", "`data.seq_len`", *(f"`{mode}`" for mode in modes)], rows)


def gpu_measured() -> str:
    """Measured training steps on one H200 beside their plan."""
    files = [RESULTS / "performance" / f"{part}.json" for part in ("train", "large")]
    records = [json.loads(file.read_text(encoding="utf-8"))["results"] for file in files if file.exists()]
    cells = [found for record in records for found in record if found.get("kind") == "nsa" and found["outcome"] == "ok"]
    steps = [found for found in cells if found.get("mode", "nsa learned") == "nsa learned"]  # as in the presets
    rows, above = [], []
    for found in sorted(steps, key=lambda found: (found["parameters"], found["length"])):
        length, batch = found["length"], found["batch"]
        planned, _ = _planned_gib(found["preset"], length, batch, found["checkpointing"], "H200")
        above.append(planned / found["peak_gib"] - 1)
        memory = [f"{gib:.1f} GiB" for gib in (found["peak_gib"], found["reserved_gib"], planned)]
        rows.append([f"`{found['preset']}`", f"{length:,}", str(batch), *memory, f"{found['tokens_per_s']:,.0f}"])
    head = ["preset", "`data.seq_len`", "`micro_batch`", "peak, measured", "reserved, measured", "peak, estimated"]
    span = f"Estimate against measured peak: {min(above):+.0%} to {max(above):+.0%}."
    return f"{table([*head, 'tokens/s, measured'], rows)}\n\n{span}"


TABLES: dict[str, Callable[[], str]] = {
    "config-sections": config_sections,
    "keys-per-query": keys_per_query,
    "recall": recall,
    "gpu-measured": gpu_measured,
    "gpu-24": lambda: gpu_plans("L4"),
    "gpu-48": lambda: gpu_plans("L40S"),
    "gpu-80": lambda: gpu_plans("H100"),
    "gpu-141": lambda: gpu_plans("H200"),
    **settings_tables.TABLES,
    **retrieval_tables.TABLES,
    **conversion_tables.TABLES,
    **evidence_tables.TABLES,
}


def pages() -> list[Path]:
    """Every page with at least one marked table, but for those of scripts/performance_tables.py."""
    found = (page for page in sorted(DOCS.rglob("*.md")) if page != DOCS / "performance.md")
    return [page for page in found if MARKED.search(page.read_text(encoding="utf-8"))]


def print_table(arguments: list[str]) -> None:
    """One table from files given as NAME=FILE."""
    records: Records = {}
    for name, _, file in (given.partition("=") for given in arguments):
        path = Path(file)
        records[name] = _run_file(path) if path.suffix == ".csv" else read_eval(path)
    makers = {"perplexity": by_context, "needle": needles, "validations": by_step, "gates": gate_shares}
    kinds = {record["eval"] for record in records.values()}
    if len(kinds) != 1 or not kinds <= makers.keys():
        raise ValueError(f"{', '.join(sorted(kinds))}: give files of one kind: {', '.join(makers)}")
    print(makers[kinds.pop()](records))


def _run_file(path: Path) -> dict[str, Any]:
    rows = read_csv(path)
    columns = rows[0].keys() if rows else set()
    if {"step", "layer", "gate_share_compressed"} <= columns:
        return {"eval": "gates", "rows": rows}
    if {"step", "loss"} <= columns:
        return {"eval": "validations", "rows": rows}
    raise ValueError(f"{path} is neither a val.csv nor a layers.csv of a run")


def main(arguments: list[str]) -> int:
    check = arguments == ["--check"]
    if arguments and not check and any("=" not in given for given in arguments):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        if arguments and not check:
            print_table(arguments)
            return 0
        stale = []
        for page in pages():
            before = page.read_text(encoding="utf-8")
            after = fill(before, TABLES)
            if after != before:
                stale.append(str(page.relative_to(ROOT)))
                if not check:
                    page.write_text(after, encoding="utf-8")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in stale:
        print(f"{name}: {'out of date, run python scripts/results_tables.py' if check else 'updated'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
