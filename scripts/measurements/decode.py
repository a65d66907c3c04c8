"""One decode step: attention alone and the whole m7c, blocks chosen by compressed keys and by a learned selector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from measurements.part import Warmup, compile_job, free
from tercet.bench.decode import HEADS, attention_rows
from tercet.bench.decode_model import model_rows

# (selector, batch sizes, contexts), by importance
ATTENTION = (("compressed", [1, 16], (65536, 2048, 16384)), ("learned", [1, 16], (65536, 16384)))
# With one sequence also at lengths where only the first token is of interest.
MODEL = (
    ("compressed", [1, 16], (65536, 2048, 16384)),
    ("learned", [1], (65536, 2048, 16384)),
    ("compressed", [1], (4096, 8192)),
)


def decode(quick: bool) -> Iterator[dict[str, Any]]:
    for selector, sizes, contexts in () if quick else ATTENTION:
        for context in contexts:
            for row in attention_rows(HEADS["P"], sizes, [context], False, selector):
                yield {"of": "attention", "selector": selector, **row}
                free()
    toys = (("compressed", [1, 2], (96,)), ("learned", [1], (96,)))
    preset, steps = ("tiny", 8) if quick else ("m7c", 32)
    for selector, sizes, contexts in toys if quick else MODEL:
        kinds = ("nsa",) if selector == "learned" else ("nsa", "dense")  # dense is the same with either
        for context in contexts:
            for row in model_rows(preset, sizes, [context], steps, selector, kinds=kinds):
                yield {"of": "model", "selector": selector, **row}


def warmups() -> list[Warmup]:
    jobs = (("attention compressed", 30.0), ("attention learned", 30.0), ("model compressed", 8.0))
    return [compile_job("decode", names, 30, gib) for names, gib in (*jobs, ("model learned", 8.0))]


def compile_steps(names: str) -> None:
    of, selector = names.split()
    if of == "attention":
        attention_rows(HEADS["P"], [1, 16], [2048, 16384, 65536], False, selector)
    else:
        model_rows("m7c", [1, 16], [2048, 4096, 8192, 16384, 65536], 4, selector)
