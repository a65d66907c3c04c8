"""Generate the tables and plots of docs/performance.md and the README from docs/results/performance/*.json.

    python scripts/measure.py docs/results/performance      # on a machine with a GPU
    python scripts/performance_tables.py                    # rewrite tables and plots
    python scripts/performance_tables.py --check            # exit code 1 if something is out of date

A page marks a table with `<!-- table:NAME -->` and `<!-- /table -->`; TABLES below maps each name to a function. Tables
of parts that not every run measures are empty without them, and bring their heading. All parts must come from the
same date, device and versions, except those in SEPARATE, whose tables state their own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import retrieval_tables
from performance import decode, modes, operator, results, steps
from performance.charts import Line, panel, svg
from performance.results import (
    MISSING,
    ROOT,
    day,
    first,
    measured_line,
    paragraph,
    part,
    ratio,
    rows,
    table,
    thousands,
    tokens,
)
from performance.steps import step, step_ratio

IMAGES = ROOT / "docs" / "images"
PAGES = (ROOT / "docs" / "performance.md", ROOT / "README.md")
SEPARATE = ("modes",)  # parts that may be measured on another day than the rest
MARKED = re.compile(r"(<!-- table:([\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


# Summaries


def measured() -> str:
    """Date, device and versions of the results."""
    files = sorted(file for file in results.RESULTS.glob("*.json") if file.stem not in SEPARATE)
    found = [part(file.stem) for file in files]
    if not found:
        return f"{MISSING}."
    about = {(p["date"], p["device"], p["torch"], p["triton"], p["tercet"]) for p in found}
    if len(about) > 1:
        raise ValueError(
            f"{results.RESULTS} mixes runs ({len(about)} dates, devices or versions): measure all parts together"
        )
    return measured_line(found[0])


def answer() -> str:
    """The summary at the top of the page."""
    ratios = {length: step_ratio(length) for length in (2048, 8192, 65536)}
    operator64, recorded64 = (
        first(rows("operator", shape="P64k", inputs=kind)).get("speedup") for kind in ("random", "recorded")
    )
    decode64, learned64 = (
        first(decode.decode_rows(selector, of="attention", context=65536, batch=16)).get("times_dense")
        for selector in ("compressed", "learned")
    )
    if None in (*ratios.values(), operator64, decode64):
        return f"{MISSING}."
    recorded = f"\n  ({ratio(recorded64)}× with blocks that a trained model selected)" if recorded64 else ""
    learned = f"\n  ({ratio(learned64)}× with a learned selector)" if learned64 else ""
    return (
        f"- **Training**: a whole step of `m7c` runs at {ratio(ratios[2048])}× dense at 2k tokens, "
        f"{ratio(ratios[8192])}× at 8k and {ratio(ratios[65536])}× at 64k.\n"
        f"- **Operator**: forward + backward with 64 heads of 128 at 64k tokens is {ratio(operator64)}× as fast as "
        f"cuDNN{recorded}.\n"
        f"- **Decode**: the attention step at 64k tokens and batch 16 is {ratio(decode64)}× as fast as dense{learned}."
    )


def readme() -> str:
    lengths = (2048, 4096, 8192, 16384, 32768, 65536)
    if not rows("train"):
        return f"{MISSING}."
    ratios = [step_ratio(length) for length in lengths]
    memory = [
        (step("nsa", n).get("peak_gib"), step("dense", n).get("peak_gib"))
        for n in lengths
    ]  # fmt: skip
    operator_ratios = [
        first(rows("operator", shape=f"P{n >> 10}k", inputs="random")).get("speedup") if n >= 8192 else None
        for n in lengths
    ]
    decodes = []
    for n in lengths:
        nsa, dense = (
            first(rows("decode", of="model", kind=kind, context=n, batch=16)).get("tokens_per_s")
            for kind in ("nsa", "dense")
        )
        decodes.append(nsa / dense if nsa and dense else None)
    block_sparse = [modes.step_ratio("block-sparse learned", n) for n in lengths]
    block_sparse_decodes = [modes.decode_ratio("block-sparse learned", n, batch=16) for n in lengths]
    lines = [
        ["`m7c`, training, tokens/s", *(thousands(step("nsa", n).get("tokens_per_s")) for n in lengths)],
        ["its dense baseline, tokens/s", *(thousands(step("dense", n).get("tokens_per_s")) for n in lengths)],
        ["**training step, × dense**", *(f"**{ratio(value)}**" for value in ratios)],
        ["**the same, block-sparse**", *(f"**{ratio(value)}**" for value in block_sparse)],
        ["memory, × dense", *(ratio(a / b if a and b else None) for a, b in memory)],
        ["operator with 64 heads of 128, × dense", *map(ratio, operator_ratios)],
        ["decoding with the whole model at batch 16, × dense", *map(ratio, decodes)],
        ["the same, block-sparse", *map(ratio, block_sparse_decodes)],
    ]
    about = part("train")
    apart = ""
    if any(block_sparse):
        apart = f", block-sparse (with learned selectors) on {day(part('modes')['date'])} with `--parts modes`"
    note = paragraph(
        f"Measured on {day(about['date'])} with `python scripts/measure.py OUT`{apart}, on one {about['device']} "
        f"(torch {about['torch']}); dense is cuDNN attention. Operator: forward + backward, 4 KV heads."
    )
    return f"{table(['context', *map(tokens, lengths)], lines)}\n\n{note}"


TABLES: dict[str, Callable[[], str]] = {
    "measured": measured,
    "answer": answer,
    "operator": operator.operator,
    "operator-checks": operator.operator_checks,
    "operator-graph": operator.operator_graph,
    "train": steps.train,
    "batches": steps.batches,
    "decode-attention": decode.decode_attention,
    "decode-model": decode.decode_model,
    "growth": operator.growth,
    "million": steps.million,
    "step-kernels": steps.step_kernels,
    "operator-kernels": operator.operator_kernels,
    "shapes": operator.shapes,
    "large": steps.large,
    "blocks": steps.blocks,
    "fp8": steps.fp8,
    "modes": modes.modes,
    "readme": readme,
}


# Plots


NSA, BLOCK_SPARSE, DENSE = "#d1782c", "#2e8b57", "#3b6ea5"


def headline() -> str:
    """The README's picture: training throughput over length, and held-out loss over training time."""
    lengths = (2048, 4096, 8192, 16384, 32768, 65536)
    kinds = (
        ("block-sparse learned", "block-sparse", "block-sparse", BLOCK_SPARSE),
        ("nsa learned", "learned", "NSA", NSA),
        ("dense", "dense", "dense", DENSE),
    )
    speed: list[Line] = []
    loss: list[Line] = []
    for mode, run, label, colour in kinds:
        measured = ((n, first(rows("modes", mode=mode, length=n, outcome="ok"))) for n in lengths)
        speed.append((label, colour, [(n, row["tokens_per_s"] / 1e3) for n, row in measured if row]))
        found = retrieval_tables.validations(run)
        loss.append((label, colour, [(retrieval_tables.minutes(run, n), found[n]) for n in (1300, 1700, 2000, 2500)]))
    left = panel(
        20, "Training throughput, thousand tokens/s", "context length, tokens", speed, log_x=True, zero=True,
        x_ticks=[(n, tokens(n)) for n in lengths],
    )  # fmt: skip
    right = panel(
        430, "Held-out loss from 8k to 64k, nats per byte", "minutes of training steps", loss, log_x=False, zero=False,
        x_ticks=[(n, str(n)) for n in range(2, 14, 2)],
    )  # fmt: skip
    return svg(840, 300, [*left, *right])


def attention_cost() -> str:
    """Time and memory of the operator over the length, log-log."""
    found = sorted((row for row in rows("growth") if row["correct"]), key=lambda row: row["tokens"])
    ticks = [(n, tokens(n)) for n in (8192, 32768, 131072, 524288)]
    parts = []
    for at, title, field in ((20, "Forward + backward, ms", "both_ms"), (430, "Peak memory, GiB", "peak_gib")):
        lines: list[Line] = [
            (label, colour, [(row["tokens"], row[f"{name}_{field}"]) for row in found if f"{name}_{field}" in row])
            for name, label, colour in (("nsa", "NSA", NSA), ("cudnn", "dense, cuDNN", DENSE))
        ]
        parts += panel(at, title, "tokens", lines, log_x=True, log_y=True, zero=False, x_ticks=ticks)
    return svg(840, 300, parts)


PLOTS: dict[Path, Callable[[], str]] = {
    IMAGES / "headline.svg": headline,
    IMAGES / "attention-cost.svg": attention_cost,
}


# Writing


def fill(page: str) -> str:
    """The page with every marked table generated again."""

    def generated(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"table:{match[2]} is unknown: pick one of {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[match[2]]()}\n{match[3]}"

    return MARKED.sub(generated, page)


def outdated() -> dict[Path, str]:
    """Files whose content differs from what the results give, with the new content."""
    wanted = {page: fill(page.read_text(encoding="utf-8")) for page in PAGES}
    wanted |= {file: plot() for file, plot in PLOTS.items()}
    return {file: new for file, new in wanted.items() if not file.exists() or file.read_text("utf-8") != new}


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        changed = outdated()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for file, new in changed.items():
        if not arguments:
            file.write_text(new, encoding="utf-8")
        state = "updated" if not arguments else "out of date: run python scripts/performance_tables.py"
        print(f"{file.relative_to(ROOT)}: {state}")
    return int(bool(arguments and changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
