"""`tercet bench attention` on a CPU: a wrong result gets no speed-up; ratios are to the fastest dense of the run."""

from __future__ import annotations

import pytest
import torch

from tercet.attention.config import NSAConfig
from tercet.bench import attention
from tercet.errors import UsageError
from tercet.terminal import table

TOY, CONFIG = "1x200x4x2x16", NSAConfig(compress_block=4, compress_stride=4, select_block=8, select_count=5, window=8)
OPTIONS = attention.Options(dense=("math",), rows=4, budget=0.0)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("name", [TOY, TOY + "x8"])
def test_the_operator_is_checked_and_timed(name: str) -> None:
    for kind in ("random", "smooth"):
        row = attention.bench(name, kind, CONFIG, OPTIONS)
        assert row["correct"], row
        assert row["speedup"] == row["math_both_ms"] / row["nsa_both_ms"] > 0


@pytest.mark.parametrize("exact", [None, 1])
def test_block_sparse_attention_by_own_scores_is_checked_and_timed(exact: int | None) -> None:
    options = OPTIONS._replace(scorer="own", exact_groups=exact)
    row = attention.bench("1x200x4x2x48", "random", CONFIG, options)
    assert row["correct"], row
    assert row["forward_speedup"] == row["math_forward_ms"] / row["own_forward_ms"] > 0
    assert row["speedup"] == row["math_both_ms"] / row["own_both_ms"] > 0
    assert row["choice_ms"] > 0


@pytest.mark.parametrize("scorer", ["compressed", "own"])
def test_a_wrong_result_gets_no_speed_up(monkeypatch: pytest.MonkeyPatch, scorer: str) -> None:
    options, real = OPTIONS._replace(scorer=scorer), attention.check_rows

    def of_other_blocks(x, config, out, indices, *rest):
        return real(x, config, out, indices.roll(40, 1), *rest)

    for check in (of_other_blocks, lambda *_: (0.5, 1.0)):
        monkeypatch.setattr(attention, "check_rows", check)
        row = attention.bench(TOY, "random", CONFIG, options)
        assert not row["correct"]
        assert row.keys().isdisjoint({"speedup", "forward_speedup", "nsa_both_ms", "own_both_ms"})
        assert "WRONG" in table([row], attention.COLUMNS)


def test_the_ratio_is_to_the_fastest_dense_of_the_same_run() -> None:
    known = {"cudnn_both_ms": 1000.0, "flash_both_ms": 900.0}
    row = attention.bench(TOY, "random", CONFIG, OPTIONS, known)
    assert row["speedup"] == 900.0 / row["nsa_both_ms"]


def test_shapes_are_named_or_given_in_full() -> None:
    assert attention.shape_of("P64k") == attention.Shape(1, 65536, 64, 4, 128)
    assert attention.shape_of("C8x2k") == attention.Shape(8, 2048, 12, 2, 64)
    assert attention.shape_of("2x96x16x1x192x128") == attention.Shape(2, 96, 16, 1, 192, 128)
    for wrong in ("X9k", "C0x2k", "1x64x3x2x16"):
        with pytest.raises(UsageError, match=f"--shapes {wrong} is unknown"):
            attention.shape_of(wrong)
