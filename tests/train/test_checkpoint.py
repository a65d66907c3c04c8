from __future__ import annotations

import copy
import errno
import io
import json
import os
import pickle
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tercet import hints
from tercet.atomic_io import write_json
from tercet.config.load import load
from tercet.config.sections import CheckpointConfig
from tercet.train import checkpoint, manifest, resume
from tercet.train.checkpoint import Checkpointer, tensors_to_save
from tercet.train.hooks import AsyncSaver
from tercet.train.manifest import CheckpointError
from tercet.train.run_folder import locate
from tercet.train.state import capture_rng, restore_rng


class Net(nn.Module):
    """Two layers that share a matrix, as a tied head does."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)))


def build(seed: int = 0, width: int = 8) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net(width)
    matrices = [p for p in net.parameters() if p.ndim > 1]
    vectors = [p for p in net.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return net, torch.optim.AdamW(groups, lr=0.1, fused=True)


def learn(net: Net, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        net(torch.randn(4, net.a.in_features)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(folder: Path, step: int, net: Net, optimizer: torch.optim.Optimizer, **config: Any) -> Path:
    saver = Checkpointer(folder, CheckpointConfig(**config))
    saver.save(step, net, optimizer, {"step": step, "tokens": 10 * step}, {"rng": {}})
    saved = saver.collect(wait=True)
    assert saved is not None
    assert saved.path == str(folder / f"step-{step:08d}")
    return Path(saved.path)


def frozen(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in tensors_to_save(net, optimizer).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_loaded_checkpoint_equals_the_saved_one_and_trains_on_identically(tmp_path: Path) -> None:
    net, optimizer = build()
    learn(net, optimizer, 3)
    path = save(tmp_path, 3, net, optimizer)
    other, other_optimizer = build(seed=9)
    learn(other, other_optimizer, 1)
    checkpoint.load_tensors(path, other, other_optimizer)
    assert same(frozen(net, optimizer), frozen(other, other_optimizer))
    assert other.a.weight is other.b.weight
    for pair in ((net, optimizer), (other, other_optimizer)):
        torch.manual_seed(1)
        learn(*pair, 2)
    assert same(frozen(net, optimizer), frozen(other, other_optimizer))
    assert [g["weight_decay"] for g in other_optimizer.param_groups] == [0.01, 0.0]


def test_a_save_has_the_state_at_its_start_while_training_continues(tmp_path: Path, monkeypatch: Any) -> None:
    net, optimizer = build()
    learn(net, optimizer)
    ordered = frozen(net, optimizer)
    publish = manifest.publish
    monkeypatch.setattr(manifest, "publish", lambda *a: (time.sleep(0.3), publish(*a))[1])
    saver = Checkpointer(tmp_path, CheckpointConfig())
    saver.save(1, net, optimizer, {"step": 1}, {})
    learn(net, optimizer, 5)
    assert saver.collect(wait=False) is None
    saved = saver.collect(wait=True)
    assert saved is not None
    assert saved.blocked_seconds < saved.seconds
    other, other_optimizer = build()
    checkpoint.load_tensors(Path(saved.path), other, other_optimizer)
    assert same(ordered, frozen(other, other_optimizer))


def test_no_pickle_is_written_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = build()
    path = save(tmp_path, 1, net, optimizer)
    assert {p.suffix for p in path.iterdir()} == {".json", ".safetensors"}
    for name in (".metadata", "__0_0.distcp", "optimizer.pt"):  # put there by somebody else
        (path / name).write_bytes(pickle.dumps(net.state_dict()))

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    checkpoint.load_tensors(path, *build(seed=2))


def assert_damaged(newest: Path, older: Path, said: str, *, verify: bool = True) -> None:
    """`newest` is refused by name, and `auto` takes the one before it."""
    with pytest.raises(CheckpointError, match=said):
        resume.find_checkpoint(str(newest), newest.parent, verify=verify)
    found = resume.find_checkpoint("auto", newest.parent, verify=verify)
    assert found is not None
    assert found.path == older
    assert newest.name in found.messages[0]


@pytest.mark.parametrize("which", ["model-00001", "model-00002", "run.json", "rank-00000", "manifest.json"])
@pytest.mark.parametrize("damage", ["a flipped byte", "truncated", "missing"])
def test_damage_to_any_file_is_found_before_anything_is_loaded(tmp_path: Path, which: str, damage: str) -> None:
    net, optimizer = build()
    learn(net, optimizer)
    older, newest = (save(tmp_path, step, net, optimizer) for step in (1, 2))
    victim = next(p for p in newest.iterdir() if which in p.name)
    content = bytearray(victim.read_bytes())
    if damage == "missing":
        victim.unlink()
    else:
        content[len(content) // 2] ^= 1
        victim.write_bytes(content if damage == "a flipped byte" else content[:-3])
    said = {"missing": re.escape(f"{victim.name} is missing")}.get(damage, "step-00000002")
    if damage == "truncated" and which.startswith("model"):
        said = f"has {len(content) - 3} bytes, the manifest says {len(content)}"
    assert_damaged(newest, older, said)


def test_without_an_intact_checkpoint_nothing_is_changed(tmp_path: Path) -> None:
    (save(tmp_path, 1, *build()) / "run.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact, nothing was changed"):
        resume.find_checkpoint("auto", tmp_path, verify=True)


@pytest.mark.parametrize("files", [None, [], {"run.json": None}, {"run.json": 7}, {"run.json": {"bytes": 1}}])
def test_a_manifest_with_a_malformed_file_list_is_skipped(tmp_path: Path, files: object) -> None:
    net, optimizer = build()
    older, newest = (save(tmp_path, step, net, optimizer) for step in (1, 2))
    write_json(newest / "manifest.json", manifest.read_json(newest / "manifest.json") | {"files": files})
    assert_damaged(newest, older, r"step-00000002: manifest\.json is damaged")


@pytest.mark.parametrize("state", [{}, {"step": None}, {"step": "2"}, {"step": 2.5}])
def test_a_run_state_without_a_step_is_skipped_even_unverified(tmp_path: Path, state: dict[str, object]) -> None:
    older, newest = (save(tmp_path, step, *build()) for step in (1, 2))
    write_json(newest / "run.json", state)
    assert_damaged(newest, older, r"step-00000002: run\.json is damaged", verify=False)


def test_a_shard_without_a_checksum_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1, *build())
    shard = next(path.glob("*.safetensors"))
    (path / "shard-00009-model-00001-of-00001.safetensors").write_bytes(shard.read_bytes())
    with pytest.raises(CheckpointError, match=r"shard-00009\S+ is not in manifest\.json"):
        manifest.verify(path)


def test_weights_and_each_kind_of_moment_are_in_separate_files(tmp_path: Path) -> None:
    net, optimizer = build()
    learn(net, optimizer)
    path = save(tmp_path, 1, net, optimizer)
    held = [
        {name.split(".", 1)[0] + "." + name.rsplit(".", 1)[-1] for name in load_file(shard)}
        for shard in sorted(path.glob("*.safetensors"))
    ]
    assert held == [
        {"model.weight", "model.bias"}, {"optimizer.exp_avg"}, {"optimizer.exp_avg_sq"}, {"optimizer.step"},
    ]  # fmt: skip


def test_a_file_is_hashed_while_it_is_written_even_in_partial_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = torch.arange(9999, dtype=torch.int32).numpy()
    true = io.FileIO.write
    monkeypatch.setattr(checkpoint.HashingFile, "_write_part", lambda self, part: true(self, part[:1000]))
    with checkpoint.HashingFile(tmp_path / "a") as stream:
        stream.write(b"head")
        assert stream.write(content) == content.nbytes
        with pytest.raises(io.UnsupportedOperation):
            stream.seek(0)
    assert (tmp_path / "a").read_bytes() == b"head" + content.tobytes()
    assert stream.record() == manifest.file_record(tmp_path / "a")


def test_one_file_of_several_that_cannot_be_written_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: checkpoint.HashingFile, part: Any) -> int:
        if "00003-of" in str(self.name):
            raise OSError(errno.ENOSPC, "No space left on device")
        return io.FileIO.write(self, part)

    net, optimizer = build()
    learn(net, optimizer)
    monkeypatch.setattr(checkpoint.HashingFile, "_write_part", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path, 1, net, optimizer)
    assert not list(tmp_path.iterdir())


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1, *build())
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"format": 1', '"format": 99'))
    with pytest.raises(CheckpointError, match="checkpoint format 99, this Tercet reads format 1"):
        resume.find_checkpoint(str(path), tmp_path, verify=True)


def test_without_any_checkpoint_auto_finds_none_and_a_path_is_an_error(tmp_path: Path) -> None:
    assert resume.find_checkpoint("auto", tmp_path / "nothing", verify=True) is None
    with pytest.raises(CheckpointError, match="neither a checkpoint folder"):
        resume.find_checkpoint(str(tmp_path), tmp_path, verify=True)
    for name in ("config.toml", "model.safetensors"):  # as `tercet import hf` writes it
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"train.init_from=.* imported weights.*--train.init_from .*safetensors"):
        resume.find_initial(tmp_path, verify=True)


def test_leftovers_of_a_crash_are_not_checkpoints_and_are_removed(tmp_path: Path) -> None:
    path = save(tmp_path, 1, *build())
    (tmp_path / ".writing-step-00000002").mkdir()
    (tmp_path / ".removing-step-00000000").mkdir()
    (tmp_path / ".writing-step-00000002" / "manifest.json").write_text("{}")
    assert manifest.complete_checkpoints(tmp_path) == [path]
    manifest.remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_the_newest_and_every_nth_checkpoint_are_kept_and_replaced(tmp_path: Path) -> None:
    net, optimizer = build()
    for step in range(1, 8):
        save(tmp_path, step, net, optimizer, keep=2, keep_every=3)
    assert [manifest.step_of(p) for p in manifest.complete_checkpoints(tmp_path)] == [3, 6, 7]
    assert (tmp_path / "latest").resolve() == (tmp_path / "step-00000007").resolve()
    for step in (8, 9):
        save(tmp_path, step, net, optimizer, keep=0)
    assert len(manifest.complete_checkpoints(tmp_path)) == 5
    learn(net, optimizer)
    path = save(tmp_path, 9, net, optimizer, keep=0)  # the same step again
    other, other_optimizer = build(seed=4)
    checkpoint.load_tensors(path, other, other_optimizer)
    assert same(frozen(net, optimizer), frozen(other, other_optimizer))


def test_a_failed_save_frees_its_space_keeps_the_earlier_one_and_names_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.EACCES, "Permission denied", "/workspace/runs")

    earlier = save(tmp_path, 1, *build())
    monkeypatch.setattr("tercet.train.checkpoint.write_json", fail)
    with pytest.raises(CheckpointError, match=r"Permission denied.*newest complete.*step-00000001.*: free some space"):
        save(tmp_path, 2, *build())
    assert manifest.complete_checkpoints(tmp_path) == [earlier]
    assert not list(tmp_path.glob(".writing*"))


def test_a_model_of_another_shape_is_refused_with_the_parameter(tmp_path: Path) -> None:
    path = save(tmp_path, 1, *build())
    with pytest.raises(CheckpointError, match=r"differs in shape: model\.a\.bias \[8\], the model has \[16\]"):
        checkpoint.load_tensors(path, *build(width=16))


@pytest.mark.parametrize(
    ("live", "stored", "message"),
    [
        ("model.a.selector.q", "", "it lacks model.a.selector.q: .*: change model.selector"),
        ("", "model.a.selector.q", "it has extra model.a.selector.q: .*: change model.selector"),
        ("optimizer.state.a", "", "it lacks optimizer.state.a: .* other parameters: .* with train.init_from"),
    ],
)
def test_weights_that_do_not_fit_name_the_fix(live: str, stored: str, message: str) -> None:
    shapes = [{name: torch.Size([2]) for name in ("model.b", given) if name} for given in (live, stored)]
    with pytest.raises(CheckpointError, match=message):
        checkpoint.compare_shapes(Path("old"), *shapes)


def test_a_changed_config_is_reported_or_refused() -> None:
    saved = {"model": {"dim": 8}, "train": {"lr": 1.0, "steps": 5}, "log": {"every": 1}}
    assert resume.check_config(saved, saved, allow_change=False) == []
    longer = saved | {"train": {"lr": 1.0, "steps": 9}, "log": {"every": 7}}
    assert resume.check_config(saved, longer, allow_change=False) == ["train.steps was 5, now 9"]
    hotter = saved | {"train": {"lr": 2.0, "steps": 5}}
    with pytest.raises(CheckpointError, match=r"train\.lr was 1\.0, now 2\.0.*allow_config_change"):
        resume.check_config(saved, hotter, allow_change=False)
    assert resume.check_config(saved, hotter, allow_change=True) == ["train.lr was 1.0, now 2.0"]
    with pytest.raises(CheckpointError, match=r"different model: model\.dim was 8, now 16.* with its own settings"):
        resume.check_config(saved, saved | {"model": {"dim": 16}}, allow_change=True)
    other = {"dim": 16, "layers": 3, "heads": 1, "kv_heads": 1, "ffn_dim": 9, "head_dim": 4}
    with pytest.raises(CheckpointError, match=r"now 9; .*; and 3 more: leave out --preset"):
        resume.check_config(saved, saved | {"model": other}, allow_change=True)


@pytest.mark.parametrize(("section", "name"), [("data", "retrieval"), ("run", "seed"), ("data", "mixture")])
def test_a_setting_that_the_order_of_the_data_depends_on_cannot_change(section: str, name: str) -> None:
    for allow_change in (False, True):
        with pytest.raises(CheckpointError, match=rf"different data: {section}\.{name} was 1, now 2: .*init_from"):
            resume.check_config({section: {name: 1}}, {section: {name: 2}}, allow_change=allow_change)


def test_a_run_of_several_ranks_is_resumed_with_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.hints.program", lambda name="tercet": name)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert hints.resume("runs/a") == "tercet train --resume auto --run.dir runs/a"
    words = "-m tercet train --resume auto --run.dir runs/a"
    assert hints.resume("runs/a", 4) == f"torchrun --standalone --nproc-per-node=4 {words}"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert hints.resume("runs/a", 4) == f"torchrun --nnodes=2 --nproc-per-node=2 {words}"


@pytest.mark.parametrize(
    ("preset", "key", "values", "refused"),
    [
        ("tiny", "model.backend", ("auto", "triton"), False),
        ("tiny-dense", "model.backend", ("auto", "triton"), False),
        ("m7c-two-branch", "model.nsa.compress_block", (32, 16), False),
        ("m7c", "model.nsa.compress_block", (32, 16), True),
        ("tiny", "model.selector_rotary", (0, 8), False),  # blocks are scored by compressed keys
        ("tiny, learned", "model.selector_rotary", (0, 8), True),
    ],
)
def test_settings_of_the_model_without_effect_may_change(
    preset: str, key: str, values: tuple[object, object], refused: bool
) -> None:
    name, _, selector = preset.partition(", ")
    given = {"model.selector": selector} if selector else {}
    saved, now = (load(name, flags=given | {key: value}).config.model_dump(mode="json") for value in values)
    message = "{} was {!r}, now {!r}".format(key, *values)
    if refused:
        with pytest.raises(CheckpointError, match=message):
            resume.check_config(saved, now, allow_change=False)
    else:
        assert resume.check_config(saved, now, allow_change=False) == [message]


def test_auto_finds_earlier_runs_with_exactly_this_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(preset="tiny").config
    assert re.fullmatch(r"runs/tiny-\d{8}-\d{6}", str(locate(config.run, "auto")))  # there is no runs/ yet
    for name in ("tiny-20250101-120000", "tiny-20250102-120000-2", "tiny-dense-20260101-120000", "tiny-2gpu"):
        (tmp_path / "runs" / name / "checkpoints" / "step-00000001").mkdir(parents=True)
    newest = tmp_path / "runs" / "tiny-dense-20260101-120000" / "checkpoints"
    os.utime(newest, (2e9, 2e9))
    os.utime(tmp_path / "runs" / "tiny-2gpu" / "checkpoints", (2e9, 2e9))
    os.utime(tmp_path / "runs" / "tiny-20250101-120000" / "checkpoints", (1e9, 1e9))
    assert locate(config.run, "auto") == Path("runs/tiny-20250102-120000-2")


def test_new_config_keys_get_defaults_and_removed_ones_are_named(tmp_path: Path) -> None:
    now = load(preset="tiny").config.model_dump(mode="json")
    before = copy.deepcopy(now)
    del before["train"]["clip"], before["health"]
    found = resume.FoundCheckpoint(tmp_path, {"config": before}, [])
    saved = resume.saved_config(found).model_dump(mode="json")
    assert resume.check_config(saved, now, allow_change=False) == []
    hotter = copy.deepcopy(now)
    hotter["train"]["clip"] = 77.0
    with pytest.raises(CheckpointError, match=r"train\.clip was 1\.0, now 77\.0"):
        resume.check_config(saved, hotter, allow_change=False)
    before["train"]["former"] = 1
    with pytest.raises(CheckpointError, match=r"this Tercet cannot read its config \(train\.former: "):
        resume.saved_config(found)
    with pytest.raises(CheckpointError, match=r"run\.json lacks 'config'"):
        resume.saved_config(resume.FoundCheckpoint(tmp_path, {}, []))


def test_a_save_that_fails_while_a_run_ends_is_reported_once() -> None:
    """The event is printed by the screen; an error that has no event is printed here."""
    for error, logged in ((CheckpointError("no space"), 1), (OSError("gone"), 0)):

        def collect(*, wait: bool, error: Exception = error) -> None:
            raise error

        events, said = [], []
        checkpointer = SimpleNamespace(collect=collect, config=CheckpointConfig())
        state, log = SimpleNamespace(step=4), SimpleNamespace(emit=events.append)
        saver = AsyncSaver(checkpointer, state, {}, log, SimpleNamespace())
        screen = SimpleNamespace(say=lambda text, style, said=said: said.append(text))
        saver.save_after_error(screen, between_steps=False)
        assert (len(events), len(said)) == (logged, 1 - logged)


def test_the_generator_continues_after_a_round_trip_through_json() -> None:
    torch.manual_seed(5)
    state = json.loads(json.dumps(capture_rng(torch.device("cpu"))))
    expected = torch.randn(3)
    torch.manual_seed(6)
    restore_rng(state, torch.device("cpu"))
    assert torch.equal(torch.randn(3), expected)
