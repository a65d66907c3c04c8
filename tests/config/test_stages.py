"""train.stages: how they are written, what follows from them, and what is refused before a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tercet.config.flags import key_options, read_arguments
from tercet.config.load import ConfigError, load, to_toml
from tercet.config.schema import RunConfig
from tercet.doctor.memory import shortage
from tercet.plan import find_device, make_plan, render

COMPACT = "1024:700,8192:250:rope_theta=500000:micro_batch=2:tokens_per_step=32768"


def with_stages(stages: object, **flags: object) -> RunConfig:
    changes = {k.replace("__", "."): v for k, v in flags.items()}
    return load(preset="m7c", flags={"train.stages": stages, **changes}).config


def rows(config: RunConfig) -> list[tuple[int, int, int, float]]:
    return [(s.data.seq_len, s.train.micro_batch, s.train.tokens_per_step, s.model.rope_theta) for s in config.stages]


def test_the_compact_form_tables_and_the_saved_file_are_the_same_stages(tmp_path: Path) -> None:
    file = tmp_path / "stages.toml"
    file.write_text(
        'preset = "m7c"\n[[train.stages]]\nseq_len = 1024\nsteps = 700\n'
        "[[train.stages]]\nseq_len = 8192\nsteps = 250\nmicro_batch = 2\ntokens_per_step = 32768\nrope_theta = 5e5\n"
    )
    from_tables = load(file=file).config
    assert from_tables == with_stages(COMPACT) == with_stages(COMPACT.split(","))
    saved = tmp_path / "config.toml"
    saved.write_text(to_toml(from_tables))
    assert load(file=saved).config == from_tables


def test_the_flag_takes_stages_with_spaces_or_commas() -> None:
    for words in (["1024:700,8192:250"], ["1024:700", "8192:250"], ["1024:700", ",8192:250"]):
        given = read_arguments(["--train.stages", *words], key_options({}), prog="tercet train")
        assert [s.seq_len for s in with_stages(given["train.stages"]).train.stages] == [1024, 8192]
    assert with_stages("none", train__steps=5).train.stages == ()


def test_steps_are_the_sum_of_the_stages_whatever_the_preset_says() -> None:
    config = with_stages("1024:700,8192:250")
    assert config.train.steps == 950
    assert config.train.stage_ends == (700, 950)
    assert [config.stage_index(step) for step in (1, 700, 701, 950, 951)] == [0, 0, 1, 1, 1]


def test_other_steps_than_the_sum_are_an_error_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"steps=900 is not the sum .* 700 \+ 250 = 950: drop train.steps"):
        with_stages("1024:700,8192:250", train__steps=900)


def test_what_a_stage_does_not_give_follows_from_the_run_and_the_stage_before() -> None:
    # m7c: 32 sequences of 2,048 tokens per pass and per step
    config = with_stages("1024:5,8192:5:rope_theta=5e5,32768:5:tokens_per_step=131072,65536:5")
    assert rows(config) == [
        (1024, 64, 65536, 1e4),
        (8192, 8, 65536, 5e5),
        (32768, 2, 131072, 5e5),
        (65536, 1, 131072, 5e5),
    ]
    assert config.total_tokens == 5 * (65536 * 2 + 131072 * 2)
    assert [stage.accumulation for stage in config.stages] == [1, 1, 2, 2]
    smaller = with_stages("1024:5,8192:5", train__micro_batch=4)
    assert [stage.train.micro_batch for stage in smaller.stages] == [8, 1]


def test_a_derived_micro_batch_divides_the_step() -> None:
    config = with_stages("1024:5", train__tokens_per_step=12 * 1024, train__micro_batch=5, data__seq_len=1024)
    assert config.stages[0].train.micro_batch == 4


def test_without_stages_the_run_is_one_stage() -> None:
    config = load(preset="tiny").config
    assert config.stages == (config,)
    assert config.at_step(7) is config
    assert config.train.stage_ends == (config.train.steps,)


def test_every_stage_is_checked_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"stage 2 \(3000:5\).*train.tokens_per_step=65536 .*: set it to 63000"):
        with_stages("1024:5,3000:5")
    with pytest.raises(ConfigError, match=r"stage 2 \(1022:5:.*2 × context ranks"):
        with_stages(
            "1024:5,1022:5:micro_batch=1:tokens_per_step=1022",
            parallel__strategy="cp", parallel__world_size=2,
        )  # fmt: skip
    with pytest.raises(ConfigError, match=r"train\.compile=on with parallel\.strategy=cp"):
        with_stages("1024:5", parallel__strategy="cp", parallel__world_size=2, train__compile="on")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("", "is empty: write stages such as 1024:700"),
        (" ,", "is empty"),
        ("1024", "is not SEQ_LEN:STEPS: write 1024:700"),
        ("1024:700:500000", "not a field of a stage: after SEQ_LEN:STEPS give micro_batch="),
        ("1024:700:theta=5", "not a field of a stage"),
        ("1024:many", "steps of entry 1: must be a valid integer"),
        ("1024:0", "must be greater than or equal to 1"),
    ],
)
def test_a_stage_that_cannot_be_read_is_an_error_with_the_form(stages: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_stages(stages)


def test_the_plan_has_a_row_for_each_stage_and_their_sums() -> None:
    config, device = with_stages("1024:100,65536:10:tokens_per_step=131072:micro_batch=2"), find_device("auto", "H200")
    plan = make_plan(config, device)
    assert plan.tokens == 100 * 65536 + 10 * 131072
    assert [(s.seq_len, s.steps, s.micro_batch) for s in plan.stages] == [(1024, 100, 64), (65536, 10, 2)]
    assert plan.seconds == pytest.approx(sum(s.seconds or 0 for s in plan.stages))
    assert plan.memory.total == max(s.memory_total for s in plan.stages)
    work = sum(s.steps * s.tokens_per_step * s.flops_per_token for s in plan.stages)
    assert plan.flops_per_token * plan.tokens == pytest.approx(work)
    shrinking = with_stages("65536:10:tokens_per_step=131072:micro_batch=2,1024:100:tokens_per_step=65536")
    assert make_plan(shrinking, device).memory == plan.memory
    lines = render(config, plan)
    (stage,) = (line for line in lines if line.startswith("  stage 2   131,072 tokens = 2 sequences × 65,536 tokens"))
    assert "; 10 steps, rope_theta 10000, " in stage


def test_a_stage_that_does_not_fit_is_named_with_its_own_fields() -> None:
    warning = shortage(
        with_stages("1024:5,65536:5:micro_batch=2:tokens_per_step=131072"), "bf16", 40 << 30, on_gpu=True
    )
    assert warning is not None
    assert warning.startswith("a step of stage 2 needs about")
    assert "micro_batch=1 in stage 2 or" in warning
