"""Tables about decoding."""

from __future__ import annotations

from typing import Any

from performance.results import Row, first, pair, ratio, rows, table, tokens

SELECTORS = ("compressed", "learned")


def decode_rows(selector: str, **fields: Any) -> list[Row]:
    """Rows of the `decode` part with this selector, by context and batch."""
    found = [row for row in rows("decode", **fields) if row.get("selector", "compressed") == selector]
    return sorted(found, key=lambda row: (row["context"], row["batch"]))


def decode_attention() -> str:
    head = ["context", "batch", "NSA, ms", "dense, ms", "fastest dense", "× dense", "keys read per KV head"]
    lines = [
        [
            selector, tokens(row["context"]), str(row["batch"]), f"{row['nsa_ms']:.4f}", f"{row['dense_ms']:.4f}",
            row["dense"], ratio(row["times_dense"]), f"{row['keys_read']:,.0f} of {row['keys_dense']:,}",
        ]
        for selector in SELECTORS
        for row in decode_rows(selector, of="attention")
    ]  # fmt: skip
    return _by_selector(head, lines)


def decode_model() -> str:
    lines = []
    prefill = any("first_token_s" in row for row in rows("decode", of="model"))
    for selector in SELECTORS:
        for nsa in decode_rows(selector, of="model", kind="nsa"):
            dense = first(rows("decode", of="model", kind="dense", context=nsa["context"], batch=nsa["batch"]))
            speeds: list[Any] = [nsa.get("tokens_per_s"), dense.get("tokens_per_s")]
            lines.append(
                [
                    selector,
                    tokens(nsa["context"]),
                    str(nsa["batch"]),
                    *(f"{speed:,.0f}" if speed else "out of memory" for speed in speeds),
                    ratio(speeds[0] / speeds[1] if all(speeds) else None),
                    *([pair(nsa.get("first_token_s"), dense.get("first_token_s"))] if prefill else []),
                    " / ".join(f"{row.get('cache_bytes_per_token', 0):,.0f}" for row in (nsa, dense)),
                ]
            )
    speeds_of = ["NSA, tokens/s", "dense, tokens/s", "× dense"]
    head = ["context", "batch", *speeds_of, *(["first token, s"] if prefill else []), "cache, B/token"]
    return _by_selector(head, lines)


def _by_selector(head: list[str], lines: list[list[str]]) -> str:
    """A table whose first column, the selector, is left out if there is only one."""
    if all(line[0] == "compressed" for line in lines):
        return table(head, (line[1:] for line in lines))
    return table(["selector", *head], lines)
