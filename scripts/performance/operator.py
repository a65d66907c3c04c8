"""Tables about the operator."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from performance.cliffs import TOO_FAR, against_128, off_by_length
from performance.results import MISSING, Row, first, number, pair, paragraph, ratio, rows, table, tokens

OPERATOR = {
    "C8x2k": "C 8×2k", "C4x4k": "C 4×4k", "C1x16k": "C 1×16k", "M4x4k": "M 4×4k",
    "P8k": "P 1×8k", "P16k": "P 1×16k", "P32k": "P 1×32k", "P64k": "P 1×64k",
}  # fmt: skip


def operator() -> str:
    found = rows("operator")
    kinds = [kind for kind in ("random", "recorded", "smooth") if any(row["inputs"] == kind for row in found)]
    lines = []
    for shape, label in OPERATOR.items():
        cells = [first(rows("operator", shape=shape, inputs=kind)) for kind in kinds]
        if any(cells):
            dense = next(cell for cell in cells if cell)
            lines.append(
                [
                    label,
                    *(ratio(cell.get("speedup")) for cell in cells),
                    *(pair(cell.get("nsa_forward_ms"), cell.get("nsa_both_ms")) for cell in cells),
                    pair(dense.get("cudnn_forward_ms"), dense.get("cudnn_both_ms")),
                    pair(dense.get("nsa_peak_gib"), dense.get("cudnn_peak_gib")),
                ]
            )
    ratios, times = [f"× dense, {kind}" for kind in kinds], [f"{kind}, ms" for kind in kinds]
    return table(["", *ratios, *times, "dense, ms", "GiB"], lines)


def operator_checks() -> str:
    found = rows("operator") + rows("growth")
    if not found:
        return f"{MISSING}."
    worst = max(row["worst_error"] for row in found)
    slots = min(row["slots_equal"] for row in found)
    wrong = sum(not row["correct"] for row in found)
    verdict = "all shapes pass" if not wrong else f"{wrong} of {len(found)} shapes FAIL"
    return (
        f"Checks in the same run: worst relative error of output and gradients {worst:.4f} (limit 0.01);\n"
        f"{slots:.2%} of selected blocks equal fp64's; {verdict}."
    )


def operator_graph() -> str:
    lines = []
    for shape in ("C8x2k", "C4x4k", "C1x16k", "M4x4k"):
        row = first(rows("operator", shape=shape, inputs="random"))
        if "nsa_graph_both_ms" in row:
            lines.append(
                [
                    OPERATOR[shape],
                    pair(row["nsa_both_ms"], row.get("cudnn_both_ms")),
                    ratio(row.get("speedup")),
                    pair(row["nsa_graph_both_ms"], row.get("cudnn_graph_both_ms")),
                    ratio(row.get("graph_speedup")),
                ]
            )
    return table(["shape", "eager, NSA / dense, ms", "× dense", "CUDA graph, NSA / dense, ms", "× dense"], lines)


def growth() -> str:
    lines = [
        [
            tokens(row["tokens"]), pair(row.get("nsa_forward_ms"), row.get("nsa_both_ms")),
            pair(row.get("cudnn_forward_ms"), row.get("cudnn_both_ms")), ratio(row.get("speedup")),
            number(row.get("nsa_peak_gib")), number(row.get("cudnn_peak_gib")),
        ]
        for row in sorted(rows("growth"), key=lambda row: row["tokens"])
    ]  # fmt: skip
    head = ["tokens", "NSA, ms", "dense, ms", "× dense", "NSA, GiB", "dense, GiB"]
    return "\n\n".join([table(head, lines), *_last_doublings()])


def _last_doublings() -> Iterator[str]:
    """How much longer the longest sequences take with each doubling."""
    times = {row["tokens"]: row["nsa_both_ms"] for row in rows("growth") if "nsa_both_ms" in row}
    if len(times) < 4:
        return
    *most, last = (f"{times[n] / times[n // 2]:.1f}×" for n in sorted(times)[-3:])
    yield paragraph(
        "From 128k tokens on, the compressed branch dominates, since it reads one key per 16 tokens. Time then grows "
        f"almost quadratically, and later faster: each doubling takes {', '.join(most)} and {last} as long."
    )


def shapes() -> str:
    """Empty if not measured."""
    found = [row for row in rows("shapes") if "ms_per_1k_tokens" in row]
    lengths = sorted({row["length"] for row in found})
    families: dict[tuple[int, ...], dict[int, Row]] = {}
    for row in found:
        family = families.setdefault((row["heads"], row["kv_heads"], row["head"], row["value"]), {})
        family[row["length"]] = row
    lines = []
    for (heads, groups, head, value), cells in families.items():
        ratios = [
            ratio(row["dense_both_ms"] / row["nsa_both_ms"] if "dense_both_ms" in row else None)
            for row in (cells.get(length, {}) for length in (2048, 8192))
        ]
        times = [number(cells.get(length, {}).get("ms_per_1k_tokens")) for length in lengths]
        lines.append([f"{heads}/{groups}", str(head) if head == value else f"{head}, values {value}", *times, *ratios])
    if not lines:
        return ""
    wrong = sum(not row.get("correct") for row in rows("shapes"))
    checks = f"{wrong} of {len(rows('shapes'))} cells FAIL" if wrong else "all pass the check"
    about = paragraph(
        "Forward + backward, random inputs, about 32,768 tokens in all: ms per 1,000 tokens (as a CUDA graph where the "
        f"host may be the slower side), and × dense of eager calls; {checks}."
    )
    head_row = ["heads", "head", *(f"{n:,}" for n in lengths), "× dense, 2k", "× dense, 8k"]
    return "\n\n".join(["### Heads, head sizes and odd lengths", about, table(head_row, lines), _cliffs(found)])


def _cliffs(found: Sequence[Row]) -> str:
    """Cells far off their neighbours in length, and other head sizes against 128."""
    off = off_by_length(found)
    cells = ", ".join(
        f"{row['heads']}/{row['kv_heads']}, head {row['head']}, {row['length']:,} ({by:+.0%})" for by, row in off
    )
    along = f"more than {TOO_FAR:.0%} off what the next shorter and longer sequences predict"
    words = [f"Cells {along}: {cells}." if off else f"No cell is {along}."]
    sizes = {head: against_128(found, head) for head in sorted({row["head"] for row in found} - {128})}
    times = (f"head {head} {min(ratios):.2f} to {max(ratios):.2f}×" for head, ratios in sizes.items())
    words.append(f"Time against head 128: {', '.join(times)}.")
    words.append("Tiles pad heads of 96 and 192 to 128 and 256 with zeros. Heads of 192 run on Triton kernels.")
    return paragraph(" ".join(words))


def operator_kernels() -> str:
    kinds = ("random", "smooth")
    found = {kind: first(rows("kernels", of="operator", inputs=kind)).get("kernels", []) for kind in kinds}
    times: dict[str, dict[str, float]] = {}
    for kind, kernels in found.items():
        for kernel in kernels:
            name = f"`{short(kernel['kernel'])}`"
            by_kind = times.setdefault(name, dict.fromkeys(kinds, 0.0))
            by_kind[kind] += kernel["ms"]
    top = sorted(times, key=lambda name: -max(times[name].values()))[:16]
    lines = [[name, *(number(times[name][kind]) if times[name][kind] else "–" for kind in kinds)] for name in top]
    rest = {kind: sum(t[kind] for name, t in times.items() if name not in top) for kind in kinds}
    if times:
        lines.append(["other", *(number(rest[kind]) for kind in kinds)])
        lines.append(["sum", *(number(sum(t[kind] for t in times.values())) for kind in kinds)])
    return table(["kernel", "random, ms", "smooth, ms"], lines)


def short(kernel: str) -> str:
    """A kernel's name without template arguments and namespaces."""
    name = re.sub(r"^void |\(anonymous namespace\)::", "", kernel).split("<")[0].split("(")[0]
    return name.split("::")[-1][:48]
