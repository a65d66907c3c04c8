"""One decode step: attention alone, and the whole m7c in every mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from measurements.part import Warmup, compile_job, free
from measurements.train import MODES, kind_of
from tercet.bench.decode import HEADS, attention_rows
from tercet.bench.decode_model import model_rows

SELECTORS = ("compressed", "learned")
BATCHES = (1, 16)
CONTEXTS = (65536, 2048, 16384)  # by importance


def attention(_: bool) -> Iterator[dict[str, Any]]:
    for selector in SELECTORS:
        for context in CONTEXTS:
            for row in attention_rows(HEADS["P"], list(BATCHES), [context], False, selector):
                yield {"selector": selector, **row}
                free()


def attention_warmups() -> list[Warmup]:
    return [compile_job("decode", selector, 30, 30.0) for selector in SELECTORS]


def compile_attention(selector: str) -> None:
    attention_rows(HEADS["P"], list(BATCHES), list(CONTEXTS), False, selector)


def models(quick: bool) -> Iterator[dict[str, Any]]:
    preset, contexts, batches, steps = ("tiny", (160,), (1, 2), 8) if quick else ("m7c", CONTEXTS, BATCHES, 128)
    for context in contexts:
        for mode in MODES:
            yield from rows_of(preset, mode, batches, (context,), steps)


def rows_of(
    preset: str, mode: str, batches: tuple[int, ...], contexts: tuple[int, ...], steps: int
) -> Iterator[dict[str, Any]]:
    for row in model_rows(preset, batches, contexts, steps, settings=MODES[mode], kinds=(kind_of(mode),)):
        yield {"mode": mode, **row}


def model_warmups() -> list[Warmup]:
    return [compile_job("decode-model", mode, 30, 12.0) for mode in MODES]


def compile_model(mode: str) -> None:
    list(rows_of("m7c", mode, BATCHES, CONTEXTS, 4))
