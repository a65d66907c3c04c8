"""Tables about decoding."""

from __future__ import annotations

from performance import results
from performance.results import Row, first, number, ratio, rows, table, tokens
from performance.train import LABELS, cell


def decode_attention() -> str:
    head = ["selector", "context", "batch", "NSA, ms", "dense, ms", "fastest dense", "× dense", "keys read per KV head"]
    found = sorted(rows("decode"), key=lambda row: (row["selector"], row["context"], row["batch"]))
    lines = (
        [
            row["selector"], tokens(row["context"]), str(row["batch"]), f"{row['nsa_ms']:.4f}",
            f"{row['dense_ms']:.4f}", row["dense"], ratio(row["times_dense"]),
            f"{row['keys_read']:,.0f} of {row['keys_dense']:,}",
        ]
        for row in found
    )  # fmt: skip
    return table(head, lines)


def decode_model() -> str:
    """Tokens/s of the whole model."""
    found = rows("decode-model")
    if not found:
        return f"{results.MISSING}."
    names = [mode for mode in LABELS if rows("decode-model", mode=mode)]
    lines = []
    for context, batch in sorted({(row["context"], row["batch"]) for row in found}):
        cells = []
        for mode in names:
            row = _row(mode, context, batch)
            failed = "out of memory" if row.get("out_of_memory") else "–"
            speed = f"{row['tokens_per_s']:,.0f}" if row.get("tokens_per_s") else failed
            cells.append(cell(speed, model_ratio(mode, context, batch)))
        lines.append([tokens(context), str(batch), *cells])
    longest = max(row["context"] for row in found)
    caches = (first(rows("decode-model", mode=mode, context=longest)) for mode in names)
    lines.append(["cache, B/token", "", *(number(row.get("cache_bytes_per_token")) for row in caches)])
    head = ["context", "batch", *(LABELS[mode] for mode in names)]
    return table(head, lines)


def model_ratio(mode: str, context: int, batch: int) -> float | None:
    """A mode's tokens/s over dense's when decoding; None for dense, or if the kernels failed their check."""
    own, dense = (_row(name, context, batch).get("tokens_per_s") for name in (mode, "dense"))
    if mode == "dense" or not own or not dense or not _row(mode, context, batch).get("correct", True):
        return None
    times: float = own / dense
    return times


def _row(mode: str, context: int, batch: int) -> Row:
    return first(rows("decode-model", mode=mode, context=context, batch=batch))
