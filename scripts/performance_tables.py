"""Generate the tables and plots of docs/performance.md and the README from docs/results/performance/*.json.

    python scripts/measure.py docs/results/performance      # on a machine with a GPU
    python scripts/performance_tables.py                    # rewrite tables and plots
    python scripts/performance_tables.py --check            # exit code 1 if something is out of date

A page marks a table with `<!-- table:NAME -->` and `<!-- /table -->`; TABLES below maps each name to a function. Tables
of parts that not every run measures are empty without them, and bring their heading. All parts must come from the
same device and versions; the page states the date of each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import retrieval_tables
from performance import decode, operator, results, steps, train
from performance.charts import Line, panel, svg
from performance.results import MISSING, day, first, item, paragraph, part, ratio, rows, table, thousands, tokens
from result_files import ROOT, fill

IMAGES = ROOT / "docs" / "images"
PAGES = (ROOT / "docs" / "performance.md", ROOT / "README.md")
SECTIONS = {
    "train": "training steps", "decode": "attention of a decode step", "decode-model": "whole-model decoding",
    "operator": "operator", "growth": "growth", "kernels": "where the time goes", "shapes": "shapes",
    "large": "larger models", "two-branch": "`1b` with two branches", "blocks": "sizes of blocks", "fp8": "FP8",
    "batches": "small batches", "million": "a million tokens",
}  # fmt: skip


# Summaries


def measured() -> str:
    """Device and versions of the results, and the date of every part."""
    found = {name: part(name) for name in SECTIONS if (results.RESULTS / f"{name}.json").exists()}
    if not found:
        return f"{MISSING}."
    about = {(p["device"], p["torch"], p["triton"], p["tercet"]) for p in found.values()}
    if len(about) > 1:
        raise ValueError(f"{results.RESULTS} mixes {len(about)} devices or versions: measure all parts with one")
    ((device, torch, triton, tercet),) = about
    dates: dict[str, list[str]] = {}
    for name, p in found.items():
        dates.setdefault(p["date"], []).append(SECTIONS[name])
    when = "; ".join(f"{day(date)} ({', '.join(names)})" for date, names in sorted(dates.items()))
    where = f"One {device}, Tercet {tercet}, torch {torch}, Triton {triton}, bf16."
    return paragraph(f"{where} Measured on {when}. Each result file names its commit.")


def answer() -> str:
    """The summary at the top of the page."""
    kinds = {"block-sparse learned": "block-sparse", "two-branch learned": "two-branch", "nsa learned": "NSA"}
    steps = {mode: [train.step_ratio(mode, n) for n in (2048, 4096, 8192, 65536)] for mode in kinds}
    decodes = {
        mode: [decode.model_ratio(mode, 65536, batch) for batch in (1, 16)]
        for mode in ("block-sparse learned", "two-branch learned", "nsa learned", "block-sparse")
    }
    if None in (value for found in (*steps.values(), *decodes.values()) for value in found):
        return f"{MISSING}."
    at = [", ".join(f"{kinds[mode]} {ratio(found[i])}×" for mode, found in steps.items()) for i in range(4)]
    block_sparse, two_branch, nsa, means = ("{}× and {}×".format(*map(ratio, found)) for found in decodes.values())
    return "\n".join(
        [
            item(
                f"**Training** steps of `m7c` with learned selectors against dense: at 8k tokens {at[2]}; at 64k "
                f"{at[3]}. At shorter contexts there is little or nothing to gain: at 4k {at[1]}; at 2k {at[0]}."
            ),
            item(
                f"**Decoding** with the whole model at 64k tokens and batch 1 and 16: block-sparse {block_sparse} "
                f"dense, two-branch {two_branch}, NSA {nsa}; block-sparse without learned selectors {means}."
            ),
        ]
    )


def readme() -> str:
    lengths = (2048, 4096, 8192, 16384, 32768, 65536)
    if not rows("train"):
        return f"{MISSING}."

    def steps(mode: str) -> list[str]:
        return [ratio(train.step_ratio(mode, n)) for n in lengths]

    def memory(mode: str) -> str:
        own, dense = (train.step(name, max(lengths)).get("peak_gib") for name in (mode, "dense"))
        return ratio(own / dense if own and dense else None)

    def decoding(batch: int) -> str:
        """A list such as "0.91, 1.19 and 1.85"."""
        *most, last = (ratio(decode.model_ratio("block-sparse learned", n, batch)) for n in (2048, 16384, 65536))
        return f"{', '.join(most)} and {last}"

    lines = [
        ["dense, tokens/s", *(thousands(train.step("dense", n).get("tokens_per_s")) for n in lengths)],
        ["**block-sparse, × dense**", *(f"**{cell}**" for cell in steps("block-sparse learned"))],
        ["**two-branch, × dense**", *(f"**{cell}**" for cell in steps("two-branch learned"))],
        ["**NSA, × dense**", *(f"**{cell}**" for cell in steps("nsa learned"))],
    ]
    about, decoded = part("train"), part("decode-model")
    note = paragraph(
        f"Training steps of `m7c`, 65,536 tokens each, on one {about['device']} (torch {about['torch']}), "
        f"{day(about['date'])}: `python scripts/measure.py OUT --parts train,decode-model`. Dense is cuDNN attention. "
        f"Peak memory at 64k, × dense: block-sparse {memory('block-sparse learned')}, two-branch "
        f"{memory('two-branch learned')}, NSA {memory('nsa learned')}. Decoding with the whole block-sparse model "
        f"({day(decoded['date'])}; dense is Tercet's own split-KV kernel) at 2k, 16k and 64k, × dense: "
        f"{decoding(1)} at batch 1, {decoding(16)} at batch 16."
    )
    return f"{table(['context', *map(tokens, lengths)], lines)}\n\n{note}"


TABLES: dict[str, Callable[[], str]] = {
    "measured": measured,
    "answer": answer,
    "operator": operator.operator,
    "operator-checks": operator.operator_checks,
    "operator-graph": operator.operator_graph,
    "train": train.train,
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
    "readme": readme,
}


# Plots


NSA, TWO_BRANCH, BLOCK_SPARSE, DENSE = "#d1782c", "#8e5ea2", "#2e8b57", "#3b6ea5"


def headline() -> str:
    """The README's picture: training throughput over length, and held-out loss over training time."""
    lengths = (2048, 4096, 8192, 16384, 32768, 65536)
    kinds = (
        ("block-sparse learned", "block-sparse", "block-sparse", BLOCK_SPARSE),
        ("two-branch learned", "two-branch", "two-branch", TWO_BRANCH),
        ("nsa learned", "learned", "NSA", NSA),
        ("dense", "dense", "dense", DENSE),
    )
    speed: list[Line] = []
    loss: list[Line] = []
    for mode, run, label, colour in kinds:
        measured = ((n, first(rows("train", mode=mode, length=n, outcome="ok"))) for n in lengths)
        speed.append((label, colour, [(n, row["tokens_per_s"] / 1e3) for n, row in measured if row]))
        found = retrieval_tables.validations(run)
        loss.append((label, colour, [(retrieval_tables.minutes(run, n), found[n]) for n in (1300, 1700, 2000, 2500)]))
    left = panel(
        20, "Training throughput, thousand tokens/s", "context length, tokens", speed, log_x=True, zero=True,
        x_ticks=[(n, tokens(n)) for n in lengths], legend="bottom left",
    )  # fmt: skip
    right = panel(
        430, "Held-out loss from 8k to 64k, nats per byte", "minutes of training steps", loss, log_x=False, zero=False,
        x_ticks=[(n, str(n)) for n in range(2, 14, 2)], legend="top right",
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


def outdated() -> dict[Path, str]:
    """Files whose content differs from what the results give, with the new content."""
    wanted = {page: fill(page.read_text(encoding="utf-8"), TABLES) for page in PAGES}
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
