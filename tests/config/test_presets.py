"""Every preset loads and plans, has a dense baseline that differs only in attention, and has the documented size."""

from __future__ import annotations

import pytest

from tercet import plan
from tercet.config.load import dense_baseline, differences, load, preset_about, preset_names
from tercet.data.tokenizers import load_tokenizer
from tercet.errors import UsageError
from tercet.model.cost import parameters
from tercet.plan import Device, find_device, make_plan, render

NAMES = preset_names()
BASELINES = [name for name in NAMES if name.endswith("-dense")]
GPU = Device("H200", 989e12, 141 * 2**30, 0.3)


def test_the_documented_presets_exist():
    documented = {"tiny", "m7c", "m7c-2gpu", "m7c-gpt2", "m7c-64k", "350m", "350m-64k", "1b", "1b-64k"}
    sharing = {"m7c-block-sparse", "m7c-two-branch"}  # their baseline is m7c-dense
    assert set(NAMES) == documented | {f"{name}-dense" for name in documented} | sharing
    assert all(dense_baseline(name) == f"{name}-dense" for name in documented)
    assert {dense_baseline(name) for name in sharing} == {"m7c-dense"}


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_has_a_plan(name):
    config = load(name).config
    plan = make_plan(config, GPU)
    text = "\n".join(render(config, plan))
    assert preset_about(name)
    assert config.accumulation * config.tokens_per_pass == config.train.tokens_per_step
    assert plan.tokens == config.train.steps * config.train.tokens_per_step
    assert plan.memory.total < GPU.memory
    assert plan.seconds > 0
    for word in ("parameters", "step", "compute", "memory", "time"):
        assert word in text


@pytest.mark.parametrize("name", BASELINES)
def test_a_dense_baseline_differs_only_in_attention(name):
    found = differences(load(name.removesuffix("-dense")).config, load(name).config)
    assert set(found) == {"run.name", "model.attention"}
    assert found["model.attention"] == ("nsa", "dense")


def test_the_block_sparse_preset_differs_from_its_baseline_only_in_attention():
    found = differences(load("m7c-dense").config, load("m7c-block-sparse").config)
    assert {name for name in found if not name.startswith("model.")} == {"run.name"}
    for name, value in {"attention": "nsa", "gate": "none"}.items():
        assert found.pop(f"model.{name}")[1] == value
    assert set(found) <= {"run.name", "model.branches", "model.shared_kv", "model.compress_selected_keys"}


def test_a_plan_warns_of_a_large_shuffle_block():
    cpu = Device("CPU", 1e11, None, 0.3)
    for length, warned in ((256, False), (65536, True)):
        config = load("tiny", flags={"data.seq_len": length, "train.tokens_per_step": 4 * length}).config
        found = [line for line in render(config, make_plan(config, cpu)) if line.startswith("warning")]
        assert len(found) == warned
        assert all("data.shuffle_sequences=32768 at data.seq_len=65536 holds 8.0 GiB" in line for line in found)


@pytest.mark.parametrize(("gib", "warned"), [(8.0, True), (2048.0, False), (None, False)])
def test_a_plan_for_this_cpu_warns_of_too_little_memory_and_suggests_a_gpu(monkeypatch, gib, warned):
    monkeypatch.setattr(plan, "_nvidia_smi", lambda: None)
    monkeypatch.setattr(plan, "host_memory", lambda: None if gib is None else round(gib * 2**30))

    def plan_lines(device, gpu=None):
        config = load("m7c", flags={"run.device": device}).config
        return render(config, make_plan(config, find_device(device, gpu)))

    hint = "hint        no GPU found: plan for one with --gpu H200"
    lines = plan_lines("auto")
    assert hint in lines
    (fit,) = (line for line in lines if line.startswith("fit"))
    assert ("does not fit: 6.8 GiB usable of 8.0 GiB" in fit) == warned
    assert ("not checked" in fit) == (gib is None)
    assert hint not in plan_lines("cpu")  # chosen explicitly
    assert not [line for line in plan_lines("auto", "H200") if line.startswith(("hint", "warning"))]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"select_count": 300}, "select_count=300 is more than 256"), ({"select_block": 256}, "select_block=256 is not")],
)
def test_a_plan_for_a_gpu_warns_of_sizes_that_the_kernels_do_not_take(changes, reason):
    long = {"data.seq_len": 32768, "train.tokens_per_step": 32768, "train.micro_batch": 1}
    flags = long | {f"model.nsa.{name}": value for name, value in changes.items()}

    def warnings(device=GPU, **more):
        return make_plan(load("m7c", flags=flags | more).config, device).warnings

    assert any(f"the reference backend is slow on a GPU: {reason}" in text for text in warnings())
    assert not any("kernels" in text for text in warnings(Device("CPU", 1e11, None, 0.5)))
    assert not any("kernels" in text for text in warnings(**{"model.backend": "reference"}))
    with pytest.raises(UsageError, match=f"model.backend=triton cannot run: {reason}"):
        warnings(**{"model.backend": "triton"})


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("m7c-dense", 73), ("m7c-block-sparse", 75), ("m7c-gpt2-dense", 112), ("m7c-gpt2", 117), ("m7c", 78),
        ("m7c-two-branch", 77),
        ("350m", 357), ("350m-dense", 338),
        ("1b", 1004), ("1b-dense", 946),
    ],
)  # fmt: skip
def test_parameter_counts(name, millions):
    assert round(parameters(load(name).config.model).total / 1e6) == millions


@pytest.mark.parametrize(
    ("name", "smallest"), [("350m", "H100"), ("350m-64k", "H100"), ("1b", "H200"), ("1b-64k", "H200")]
)
def test_the_larger_presets_fit_as_they_are(name, smallest):
    for preset in (name, f"{name}-dense"):
        assert make_plan(load(preset).config, find_device("auto", smallest)).fits
        assert make_plan(load(preset, flags={"train.optimizer": "muon"}).config, find_device("auto", smallest)).fits


@pytest.mark.parametrize(
    ("name", "shown", "gib"),
    [
        ("4090", "RTX 4090", 23.5),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 23.5),
        ("H100-PCIe", "H100 PCIe", 79.1),
        ("A100 80GB", "A100 80 GB", 79.1),
        ("A100-SXM4-40GB", "A100 40 GB", 39.4),
        ("24 GB", "a GPU with 24 GB", 22.0),  # as the A10 and L4, which have the least
        ("30GB", "a GPU with 30 GB", 27.9),
        ("24GiB", "a GPU with 24 GiB", 24.0),
    ],
)
def test_gpus_are_found_in_any_spelling(name, shown, gib):
    device = find_device("auto", name)
    assert (device.name, round(device.memory / 2**30, 1)) == (shown, gib)


@pytest.mark.parametrize("name", ["4091", "H2000", "A100 64GB", "RTX 4090 Laptop GPU"])
def test_an_unknown_gpu_is_a_usage_error(name):
    with pytest.raises(UsageError, match=f"--gpu {name}"):
        find_device("auto", name)


@pytest.mark.parametrize(("mode", "memory"), [("none", "16GB"), ("full", "8GB")])
def test_a_plan_that_does_not_fit_names_settings_with_which_it_does(mode, memory):
    gpu = find_device("auto", memory)
    flags = {"train.micro_batch": 32, "train.tokens_per_step": 65536, "train.activation_checkpointing": mode}
    flags |= {"model.dim": 1024}
    config = load("m7c", flags=flags).config
    made = make_plan(config, gpu)
    assert not made.fits
    assert len(made.fixes) == 3
    assert {"train.micro_batch"} in [set(fix.flags) for fix in made.fixes]
    # a setting that is already on is not advised
    assert ("train.activation_checkpointing" in str(made.fixes)) == (mode == "none")
    for fix in made.fixes:
        changed = make_plan(load("m7c", flags=flags | fix.flags).config, gpu)
        assert changed.fits
        assert changed.memory.total == fix.memory
    assert make_plan(config, find_device("auto", "H200")).fits


def test_more_gpus_are_advised_with_the_largest_batch_that_they_can_share():
    fixes = [fix.flags for fix in make_plan(load("m7c").config, find_device("auto", "4090")).fixes]
    assert {"parallel.strategy": "fsdp", "parallel.world_size": 2, "train.micro_batch": 16} in fixes


def test_the_larger_presets_ask_for_a_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"tokenizer.json does not exist: give --data.tokenizer .*train-tokenizer"):
        load_tokenizer(load("350m").config.data.tokenizer)
