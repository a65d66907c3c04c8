"""Configuration layers: precedence, origins, saving and error messages."""

from __future__ import annotations

import json
import tomllib

import pytest

from tercet.config.keys import all_keys
from tercet.config.load import ConfigError, describe, differences, load, preset_names, to_toml, write_config


def write(tmp_path, text: str):
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_later_layers_win_and_origins_are_recorded(tmp_path):
    file = write(tmp_path, "[train]\nlr = 1e-3\nclip = 2\n[model.nsa]\nwindow = 256\n")
    loaded = load("m7c", file, {"train.lr": 5e-4})
    c = loaded.config
    assert (c.train.lr, c.train.clip, c.model.nsa.window, c.train.warmup_steps) == (5e-4, 2.0, 256, 100)
    origins = {k: loaded.origins[k] for k in ("train.lr", "train.clip", "model.nsa.window", "train.warmup_steps")}
    assert origins == {
        "train.lr": "flag",
        "train.clip": f"file {file}",
        "model.nsa.window": f"file {file}",
        "train.warmup_steps": "preset m7c",
    }
    assert loaded.origins["train.betas"] == "default"
    assert set(loaded.origins) == set(all_keys())


def test_a_file_can_build_on_a_preset(tmp_path):
    file = write(tmp_path, 'preset = "tiny"\nabout = "mine"\n[train]\nsteps = 7\n')
    loaded = load(file=file)
    assert loaded.config.train.steps == 7
    assert loaded.config.model == load("tiny").config.model
    assert loaded.origins["model.dim"] == "preset tiny"
    assert load("tiny", file).config == loaded.config


def test_conflicting_presets_are_rejected(tmp_path):
    file = write(tmp_path, 'preset = "tiny"\n')
    with pytest.raises(ConfigError, match=r"--preset m7c and --config .* builds on preset tiny: give only one"):
        load("m7c", file)


@pytest.mark.parametrize("name", preset_names())
def test_a_saved_configuration_repeats_the_run(name, tmp_path):
    loaded = load(name, None, {"run.dir": "somewhere", "train.lr": 0.000123456789012345})
    write_config(loaded.config, loaded.origins, tmp_path)
    again = load(file=tmp_path / "config.toml").config
    assert differences(loaded.config, again) == {"run.dir": ("somewhere", None)}
    assert json.loads((tmp_path / "origins.json").read_text())["train.lr"] == "flag"
    assert "lr = 0.000123456789012345  # flag" in (tmp_path / "config.toml").read_text()


def test_values_of_every_type_survive_a_toml_round_trip(tmp_path):
    file = write(
        tmp_path,
        '[data]\nsource = "mixture"\ntokenizer = "tab\\tquote\\" ünï \\u007f"\n'
        '[[data.mixture]]\nsource = "synthetic"\nweight = 3\n'
        '[[data.mixture]]\nsource = "text"\npath = ["a b", "c"]\nname = "x"\n'
        '[model]\nlayers = 3\nattention = ["nsa", "dense", "nsa"]\nvalue_dim = 32\nqk_norm = true\n',
    )
    config = load(file=file).config
    saved = write(tmp_path, to_toml(config))
    tomllib.loads(saved.read_text())
    assert load(file=saved).config == config
    assert config.model.attention_kinds == ("nsa", "dense", "nsa")
    assert config.data.mixture[1].path == ("a b", "c")


@pytest.mark.parametrize(
    ("pattern", "kinds"),
    [
        ("window", ("window",) * 12),
        ("nsa*11,dense", ("nsa",) * 11 + ("dense",)),
        ("window*3, nsa", ("window", "window", "window", "nsa") * 3),
        ("dense, nsa *2", ("dense", "nsa", "nsa") * 4),
    ],
)
def test_a_pattern_of_attention_is_repeated_to_fill_the_layers(tmp_path, pattern, kinds):
    config = load(file=write(tmp_path, f'[model]\nlayers = 12\nattention = "{pattern}"\n')).config
    assert config.model.attention_kinds == kinds
    assert load(file=write(tmp_path, to_toml(config))).config == config


def test_none_in_a_file_resets_an_optional_value(tmp_path):
    file = write(tmp_path, '[model]\nvalue_dim = "none"\n[run]\nname = "none"\n')
    config = load(None, file).config
    assert config.model.value_dim is None
    assert config.run.name == "none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nlrr = 1\n", r"unknown key train.lrr in file .*mine.toml: did you mean train.lr"),
        ("lr = 1\n", r"unknown key lr in file .*: did you mean train.lr\?"),
        ("[model.nsa]\nwindw = 1\n", r"unknown key model.nsa.windw in file .*: did you mean model.nsa.window\?"),
        ("[zzz]\nqqqq = 1\n", r"unknown key zzz.qqqq in file .*: `tercet config show` lists all keys"),
        ("train = 3\n", r"train=3 in file .* must be a table: write \[train\]"),
        ("[model]\nnsa = 3\n", r"model.nsa in file .* is a table, not a value"),
        ('[train]\nsteps = "three"\n', r"train.steps='three' \(file .*\): must be a valid integer, such as 1000$"),
        ("[train]\nsteps = 0\n", r"train.steps=0 \(file .*\): must be greater than or equal to 1$"),
        ('[log]\ntensorboard = "maybe"\n', r"log.tensorboard='maybe' \(file .*\): must be a valid boolean or 'auto'$"),
        ("[run]\nname = 3\n", r"run.name=3 \(file .*\): must be a valid string, such as run$"),
        ('[run]\nname = "../../up"\n', r"run.name='../../up' \(file .*\): must be a file name without \"/\""),
        ("[train]\nlr = -1\n", r"train.lr=-1 \(file .*\): must be greater than 0"),
        ("[train]\nlr = nan\n", r"train.lr=nan \(file .*\): must be a finite number"),
        ("[model]\nlayers = 1000000\n", r"model.layers=1000000 \(file .*\): must be less than or equal to 1024$"),
        ('[data]\nsource = ["text"]\n', r"data.source=\['text'\] \(file .*\): must be 'python-source', "),
        ("[model]\nattention = [3]\n", r"model.attention=\[3\] \(file .*\): must be a valid string"),
        ("[train]\nbetas = 5\n", r"train.betas=5 \(file .*\): must be a valid tuple$"),
        (".".join("a" * 60) + " = 1\n", r"unknown key a\.a.* in file .*: `tercet config show` lists all keys"),
        ("[model]\nkv_heads = 5\n", r"heads=12 is not a multiple of kv_heads=5: pick one of 1, 2, 3, 4, 6, 12"),
        ('[model]\nattention = "flash"\n', r"model.attention='flash' \(file .*\): 'flash' is unknown: pick from nsa"),
        ('[model]\nattention = ["nsa"]\n', r"attention names 1 layers but layers=12"),
        ('[model]\nattention = ["window*3", "nsa"]\n', r"'window\*3' is unknown: .*: write a pattern as one text"),
        ('[model]\nattention = "window*4,nsa"\n', r"names 5 layers but layers=12 is not a multiple of 5: .*10 or 15"),
        ('[model]\nattention = "nsa*13"\n', r"names 13 layers but layers=12 .*; use layers 13, or another"),
        ('[model]\nattention = "nsa*99999999999"\n', r"expected a count from 1 to 1024"),
        ('[model]\nbranches = ["window", "window"]\n', r"branches=.*each once"),
        ('[model]\nbranches = ["window"]\nselector = "learned"\n', r"selector=learned has no effect.*add selected"),
        ('[model]\nbranches = ["selected", "window"]\ngate = "none"\n', r"not selected,window; drop branches"),
        ("[model.nsa]\nwindow = 0\n", r"window=0 must be at least 1"),
        ("[model.nsa]\ncompress_stride = 7\n", r"compress_stride=7 does not divide compress_block=32"),
        ("[parallel]\nworld_size = 2\n", r"world_size=2 with strategy=single: pick ddp or fsdp"),
        ("[parallel]\nshard_ranks = 2\n", r"shard_ranks=2 is not used by strategy=single: drop it, or pick hsdp"),
        ("[train]\nlr = 1e-3\nlr = 2\n", r"mine.toml is not valid TOML: .*line 3"),
        ("train.steps = " + "9" * 30, r"train.steps is an integer of 30 digits: it must fit in 64 bits"),
        ("data.mixture = [1]", r"data.mixture=\[1\] \(file"),
        ("model.nsa = {compress_block = 4611686018427387904, compress_stride = 3}", r"does not divide compress_block"),
        ("train = {micro_batch = 3, tokens_per_step = 4611686018427387904}", r"is not a multiple"),
        ('preset = "tinny"\n', r"unknown preset tinny: did you mean tiny\?"),
        ("preset = 3\n", r"preset=3 in file .* must be the name of a preset"),
    ],
)
def test_errors_are_one_line_and_name_the_fix(text, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as caught:
        load(file=write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.toml cannot be read: No such file"):
        load(file=tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(file=tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not valid TOML: 'utf-8' codec"):
        load(file=tmp_path / "binary.toml")


def test_several_errors_are_counted():
    with pytest.raises(ConfigError, match=r"train.lr=x \(flag\).* \(and 1 more\)"):
        load(flags={"train.lr": "x", "train.clip": "y"})


def test_accumulation_follows_from_tokens_per_step():
    at = {"data.seq_len": 1024, "train.micro_batch": 4}
    assert load(flags={**at, "train.tokens_per_step": 4096}).config.accumulation == 1
    assert load(flags={**at, "train.tokens_per_step": 40960}).config.accumulation == 10
    ddp = {"parallel.strategy": "ddp", "parallel.world_size": 2}
    assert load(flags={**at, **ddp, "train.tokens_per_step": 40960}).config.accumulation == 5


def test_an_indivisible_tokens_per_step_suggests_valid_values():
    at = {"data.seq_len": 1024, "train.micro_batch": 4}
    with pytest.raises(ConfigError, match=r"= 4 × 1024 × 1 = 4096: set it to 8192 or 12288"):
        load(flags={**at, "train.tokens_per_step": 10000})
    with pytest.raises(ConfigError, match=r"= 4096: set it to 4096, or use a smaller train.micro_batch"):
        load(flags={**at, "train.tokens_per_step": 1000})
    load(flags={**at, "train.tokens_per_step": 1024, "train.micro_batch": 1})


def test_a_configuration_is_frozen():
    config = load("tiny").config
    with pytest.raises(Exception, match="frozen"):
        config.train.lr = 1.0  # type: ignore[misc]
    with pytest.raises(AttributeError):
        config.model.nsa.window = 1  # type: ignore[misc]


def test_describe_shows_non_default_values_as_toml():
    loaded = load(flags={"train.lr": 1e-3})
    assert describe(loaded.config, loaded.origins) == ["train.lr = 0.001  # flag"]


def test_describe_of_a_repeated_run_adds_no_lines(tmp_path):
    loaded = load("tiny", None, {"train.clip": 1.0})
    write_config(loaded.config, loaded.origins, tmp_path)
    again = load(file=tmp_path / "config.toml")
    first, second = ([line.split("  # ")[0].strip() for line in describe(x.config, x.origins)] for x in (loaded, again))
    assert "train.clip = 1.0" in first
    assert set(second) == set(first) - {"train.clip = 1.0"}


def test_every_key_has_a_help_text():
    assert [path for path, key in all_keys().items() if not key.about.strip()] == []


def test_training_selectors_alone_needs_some() -> None:
    with pytest.raises(ConfigError, match=r"train\.selector\.only has no effect with model.selector=compressed"):
        load(flags={"train.selector.only": True})
    with pytest.raises(ConfigError, match=r"train\.selector\.only has nothing to train with model.attention=dense"):
        load(flags={"train.selector.only": True, "model.selector": "learned", "model.attention": "dense"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.seq_len": 1024}, r"all of its sequence of at most 1024 tokens .*use sequences of more than 1024"),
        ({"train.stages": "512:2,1024:2"}, "use sequences of more than 1024"),
        ({"model.gate": "none", "model.dense_below": 4096}, r"dense_below = 4096.*or lower model\.dense_below"),
        ({"model.nsa.select_count": 3}, r"select_count=3 blocks .* forced .*raise model\.nsa\.select_count above 3"),
    ],
    ids=str,
)
def test_training_selectors_alone_needs_blocks_to_choose(changes, words):
    flags = {
        "model.selector": "learned", "data.seq_len": 2048, "train.micro_batch": 1, "train.tokens_per_step": 2048,
    }  # fmt: skip
    load(flags=flags | {"train.selector.only": True})
    load(flags=flags | {"train.selector.only": True, "train.stages": "1024:2,2048:2"})
    load(flags=flags | changes)
    with pytest.raises(ConfigError, match=rf"train\.selector\.only=true has nothing to train.*{words}"):
        load(flags=flags | {"train.selector.only": True} | changes)


def test_a_query_cannot_select_far_more_than_there_is():
    sizes = {"data.seq_len": 256, "model.nsa.select_block": 32}
    load("tiny", flags=sizes | {"model.nsa.select_count": 256})  # 8 blocks, and the kernels take 256
    load("tiny", flags=sizes | {"model.nsa.select_block": 128})
    with pytest.raises(ConfigError, match=r"select_count=257 is far more than the 8 blocks .*: use 8 to read"):
        load("tiny", flags=sizes | {"model.nsa.select_count": 257})
    with pytest.raises(ConfigError, match=r"select_block=512 is more than the 256 tokens"):
        load("tiny", flags=sizes | {"model.nsa.select_block": 512})
    stages = {"train.stages": "256:2,16384:2:tokens_per_step=16384", "model.nsa.select_block": 32}
    load("tiny", flags=stages | {"model.nsa.select_count": 512})
    with pytest.raises(ConfigError, match="select_count=513 is far more than the 512 blocks"):
        load("tiny", flags=stages | {"model.nsa.select_count": 513})
    load("tiny-dense", flags=sizes | {"model.nsa.select_count": 1000})


def test_profiled_steps_begin_within_the_run():
    for steps in ("4:4", "4:30"):
        load("tiny", flags={"train.steps": 4, "profile.steps": steps})
    with pytest.raises(ConfigError, match=r"profile\.steps=5:6 begins after the last step, train\.steps=4"):
        load("tiny", flags={"train.steps": 4, "profile.steps": "5:6"})
    load("tiny", flags={"train.stages": "64:4,128:4", "profile.steps": "5:6"})


def test_settings_of_muon_need_muon():
    with pytest.raises(ConfigError, match=r"muon.lr=0.02 has no effect with optimizer=adamw"):
        load("tiny", None, {"train.muon.lr": 0.02})
    assert load("tiny", None, {"train.muon.lr": 0.02, "train.optimizer": "muon"}).config.train.muon.lr == 0.02
