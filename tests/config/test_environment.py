"""Every switch of the earlier scripts has its answer, and every key that an answer names exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from tercet.config.environment import REPLACEMENTS, environment_warnings
from tercet.config.keys import all_keys

FORMER = [
    "NSA_PREFILL_BATCHED", "NSA_DISABLE_AUX_STATS", "NSA_SEL_RANGES_V2", "NSA_USE_FA2", "NSA_DDP_STATIC_GRAPH",
    "NSA_DDP_FIND_UNUSED", "NSA_DDP_BUCKET_MB", "NSA_DDP_COMPRESS", "NSA_FSDP_SHARDING", "NSA_FSDP_FORWARD_PREFETCH",
    "NSA_FSDP_LIMIT_ALL_GATHERS", "NSA_ALLOW_SINGLE_RANK", "NSA_MEM_DUMP_EVERY", "NSA_TB_DISABLE", "NSA_NVTX",
    "NSA_ACCUM",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMER)
def test_each_former_switch_has_a_named_answer(name):
    (line,) = environment_warnings({name: "1", "PATH": "/bin"})
    key, why = REPLACEMENTS[name]
    assert line.startswith(f"{name}=1 is set but not read: ")
    assert why in line
    assert key is None or key in line


def test_answers_name_keys_that_exist():
    assert {key for key, _ in REPLACEMENTS.values() if key} <= set(all_keys())


def test_unknown_switches_are_reported_and_other_variables_ignored():
    lines = environment_warnings({"NSA_WHATEVER": "x", "OMP_NUM_THREADS": "2", "XNSA_": "1"})
    assert lines == ["NSA_WHATEVER=x is set but not read: Tercet takes no settings from the environment"]
    assert environment_warnings({}) == []


def test_the_page_for_those_who_come_from_the_scripts_tells_the_same():
    page = (Path(__file__).parents[2] / "docs" / "from-m7c.md").read_text(encoding="utf-8")
    rows = {cells[1].strip(" `"): cells for line in page.splitlines() if (cells := line.split("|"))[1:]}
    for name, (key, _) in REPLACEMENTS.items():
        assert rows[name][2].strip() == (f"`{key}`" if key else "–")
