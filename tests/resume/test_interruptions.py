"""Signals, full disks, damaged files, changed settings: a clear message each time, and nothing lost."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import runs
from fork_server import ForkServer
from parallel.world import TorchrunRun, flags
from runs import SMALL, events_of, losses, newest
from tercet import atomic_io
from tercet.config.load import to_toml
from tercet.data import files, loader
from tercet.data.stream import BadRecordError, DataError
from tercet.doctor import machine
from tercet.errors import TercetError
from tercet.hints import program
from tercet.parallel.launch import Launch
from tercet.report.read import read_run
from tercet.report.verdict import record_gaps
from tercet.telemetry.event_log import events_file, read_events
from tercet.telemetry.events import CheckpointFailed, Noted, RunEnded, RunStarted, Sampled, StepLogged, Validated
from tercet.train import trainer, validate
from tercet.train.checkpoint import HashingFile
from tercet.train.hooks import StopSignals
from tercet.train.manifest import complete_checkpoints, step_of
from tercet.train.trainer import train

# one layer is enough here; test_exact_resume.py resumes two
small, train_small = (partial(make, model__layers=1) for make in (runs.small, runs.train_small))
LONG = {"train__steps": 100_000, "checkpoint__every": 100_000, "train__warmup_steps": 0}


def ended(folder: Path) -> RunEnded:
    last = list(read_events(events_file(folder)))[-1]
    assert isinstance(last, RunEnded)
    return last


def saved_steps(folder: Path) -> list[int | None]:
    return [step_of(p) for p in complete_checkpoints(folder / "checkpoints")]


@pytest.fixture(scope="module")
def finished(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, saved every two. Tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert fork_server.run(small(run__dir=str(folder))).code == 0
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_saves_the_current_step_and_prints_how_to_resume(
    fork_server: ForkServer, tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "run"
    child = fork_server.start(small(run__dir=str(folder), **LONG))
    child.until("step      3/")
    child.signal(number)
    assert child.wait() == 128 + number
    last = ended(folder)
    assert (last.outcome, last.reason) == ("interrupted", number.name)
    assert saved_steps(folder) == [last.step]
    assert f"saved step {last.step} and stopped" in child.output
    assert f"--resume auto --run.dir {folder}" in child.output
    assert max(losses(folder)) == last.step


def test_a_lost_terminal_saves_the_current_step(fork_server: ForkServer, tmp_path: Path) -> None:
    folder, config = tmp_path / "run", tmp_path / "config.toml"
    config.write_text(to_toml(small(**LONG)))
    controller, terminal = os.openpty()
    command = ("train", "--config", str(config), "--run.dir", str(folder))
    child = fork_server.call("fork_server:_main_on_terminal", os.ttyname(terminal), *command)
    while ended_step(folder) < 3:
        os.read(controller, 65536)
    os.close(terminal)
    os.close(controller)
    assert child.wait(60) == 128 + signal.SIGHUP
    assert saved_steps(folder) == [ended(folder).step]


def test_nohup_keeps_a_run_alive() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_rank_whose_torchrun_was_killed_saves_and_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, step = tmp_path / "run", trainer.train_step

    def orphaned_in_step_3(*arguments: Any, **options: Any) -> Any:
        if options["step"] == 3:
            monkeypatch.setattr(os, "getppid", lambda: 1)
        return step(*arguments, **options)

    torchrun = os.getppid()
    monkeypatch.setattr(trainer, "train_step", orphaned_in_step_3)
    monkeypatch.setattr(trainer.Launch, "from_environment", lambda: Launch(by_torchrun=True))
    assert train_small(folder, **LONG) == 143
    assert (ended(folder).outcome, ended(folder).reason) == ("interrupted", f"torchrun (pid {torchrun}) is gone")
    assert saved_steps(folder) == [3]
    assert capfd.readouterr().err.count("is gone: saving after this step, then exiting") == 1


@pytest.mark.slow
def test_ranks_of_a_killed_torchrun_save_together_and_exit(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = SMALL | {"run.dir": str(folder), "parallel.strategy": "fsdp", "train.tokens_per_step": 256}
    settings |= {"train.steps": 100_000, "checkpoint.every": 0}
    with TorchrunRun(tmp_path / "out", 2, "--preset", "tiny", *flags(settings)) as run:
        run.until("step      9/")
        run.process.kill()
        run.process.wait()
        deadline = time.monotonic() + 60
        while any(Path(f"/proc/{run.pid(rank)}").exists() for rank in range(2)):
            assert time.monotonic() < deadline, run.text
            time.sleep(0.1)
    assert f"torchrun (pid {run.process.pid}) is gone: saving" in run.text
    assert saved_steps(folder) == [ended(folder).step]


def test_a_second_ctrl_c_exits_immediately(fork_server: ForkServer, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # A step of many micro-batches: the first Ctrl-C would have to wait for its end.
    config = small(run__dir=str(folder), **LONG | {"train__tokens_per_step": 128 * 5000})
    child = fork_server.start(config)
    child.until("model ")
    time.sleep(0.3)
    child.signal(signal.SIGINT)
    child.until("Ctrl-C again exits at once")
    begun = time.monotonic()
    child.signal(signal.SIGINT)
    assert child.wait() == 130
    assert time.monotonic() - begun < 2
    assert "complete checkpoints are intact" in child.output
    assert saved_steps(folder) == []


def test_a_signal_works_while_the_loader_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, straight, true = tmp_path / "run", tmp_path / "straight", loader.pack
    config = {"train__steps": 8, "checkpoint__every": 0, "train__micro_batch": 1}  # two batches a step
    hung, over = threading.Event(), threading.Event()

    def hanging(*args: Any) -> Iterator[Any]:
        for i, packed in enumerate(true(*args)):
            if i == 7:  # in the middle of step 4
                hung.set()
                over.wait()
            yield packed

    def interrupt() -> None:
        hung.wait()
        while ended_step(folder) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("tercet.data.stream.POLL_SECONDS", 0.05)
    monkeypatch.setattr("tercet.data.stream.GRACE_SECONDS", 0.1)
    monkeypatch.setattr("tercet.data.stream.CLOSE_SECONDS", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(loader, "pack", hanging)
        threading.Thread(target=interrupt, daemon=True).start()
        assert train_small(folder, **config) == 143
    over.set()
    assert saved_steps(folder) == [3]
    assert train_small(folder, **config, resume="auto") == 0
    assert train_small(straight, **config) == 0
    assert losses(folder) == losses(straight)


def test_a_signal_during_the_last_sample_leaves_a_saved_and_complete_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, true, chosen = tmp_path / "run", trainer.sample_text, 0

    def interrupted(*args: Any, agree: Callable[[Callable[[], int]], int], **options: Any) -> str:
        assert saved_steps(folder)[-1] == 6

        def counting(choose: Callable[[], int]) -> int:
            nonlocal chosen
            chosen += 1
            if chosen == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return agree(choose)

        return true(*args, agree=counting, **options)

    config = small(run__dir=str(folder), train__steps=6, train__sample_tokens=50)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "sample_text", interrupted)
        assert train(config) == 0
    assert chosen == 3
    assert "the sample was interrupted: --resume auto repeats it" in capsys.readouterr().out
    assert ended(folder).outcome == "completed"
    assert train(config, resume="auto") == 0  # no step, only the interrupted sample
    assert [e.step for e in read_events(events_file(folder)) if isinstance(e, Sampled)] == [6]


@pytest.mark.parametrize("stages", [{}, {"train__stages": "64:4,128:2"}])
def test_a_signal_ends_a_validation_after_its_batch_and_a_resume_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: dict[str, str]
) -> None:
    folder, straight, batches, true = tmp_path / "run", tmp_path / "straight", 0, validate.to_device
    options = {"train__val_every": 2, "train__val_tokens": 640, "checkpoint__every": 0, **stages}

    def interrupted(*args: Any) -> Any:
        nonlocal batches
        batches += 1
        if batches == 7:  # of five for each validation
            os.kill(os.getpid(), signal.SIGTERM)
        return true(*args)

    with monkeypatch.context() as patch:
        patch.setattr(validate, "to_device", interrupted)
        assert train_small(folder, **options) == 143
    # the end of a stage cannot be repeated
    assert (batches, saved_steps(folder)[-1]) == ((10 if stages else 7), 4)
    assert train_small(folder, **options, resume="auto") == train_small(straight, **options) == 0
    assert losses(folder) == losses(straight)
    found, expected = ([(e.step, e.loss) for e in events_of(run, Validated)] for run in (folder, straight))
    assert found == expected
    assert [step for step, _ in found] == [2, 4, 6]


def ended_step(folder: Path) -> int:
    path = events_file(folder)
    return max((e.step for e in read_events(path)), default=0) if path.exists() else 0


def test_a_refused_resume_does_not_touch_the_checkpoints(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(run__dir=str(copied))
    earlier = str(complete_checkpoints(copied / "checkpoints")[0])
    with monkeypatch.context() as patch:
        patch.setattr(machine, "NEEDED", (("torch", (99,), None),))
        with pytest.raises(TercetError, match="doctor: versions"):
            train(config, resume=earlier)
    assert saved_steps(copied) == [2, 4, 6]
    assert train(config, resume=earlier) == 0
    assert len(list((copied / "checkpoints").glob("abandoned-*"))) == 2


def test_the_printed_command_resumes_an_interrupted_run_to_the_same_losses(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    folder, straight = tmp_path / "a run", tmp_path / "straight"
    child = fork_server.start(small(run__dir=str(folder), train__steps=30, checkpoint__every=0))
    child.until("step  5/")
    child.signal(signal.SIGTERM)
    assert child.wait() == 143
    named = re.search(r"resume with: (.*)", child.output)
    assert named, child.output
    command = shlex.split(named.group(1))
    start = shlex.split(program())
    assert command[: len(start)] == start
    resumed = fork_server.call("tercet.cli:main", *command[len(start) :])
    assert resumed.wait() == 0, resumed.output
    assert "resuming from" in resumed.output
    assert not re.search("warning: (?!throughput_drop)", resumed.output), "a busy machine may slow it down"
    assert fork_server.run(small(run__dir=str(straight), train__steps=30, checkpoint__every=0)).code == 0
    assert losses(folder) == losses(straight)


def test_a_bad_record_keeps_the_steps_before_it_and_may_be_skipped_on_resume(tmp_path: Path) -> None:
    data, folder = tmp_path / "data.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps({"text": f"{i}" * 60}) + "\n" for i in range(40)) + "{damaged\n")
    config = {"data__source": "jsonl", "data__path": [str(data)], "data__shuffle_block": 10, "checkpoint__every": 0}
    config |= {"train__steps": 40, "data__validation_fraction": 0.0, "run__dir": str(folder)}
    with pytest.raises(BadRecordError, match="record 41"):
        train(small(**config))
    last = ended(folder)
    assert last.step > 10
    assert saved_steps(folder) == [last.step]
    assert train(small(**config, data__bad_records="skip"), resume="auto") == 0
    assert list(losses(folder)) == list(range(1, 41))


def test_a_repaired_record_is_accepted_on_resume(tmp_path: Path) -> None:
    data, folder = tmp_path / "data.jsonl", tmp_path / "run"
    data.write_text(json.dumps({"text": "word " * 400}) + "\n{damaged\n")
    config = {"data__source": "jsonl", "data__path": [str(data)], "data__shuffle_block": 1, "checkpoint__every": 0}
    config |= {"train__steps": 20, "data__validation_fraction": 0.0, "data__shuffle": False, "run__dir": str(folder)}
    with pytest.raises(BadRecordError, match="record 2"):
        train(small(**config))
    data.write_text(data.read_text().replace("{damaged", '{"text": "repaired"}'))
    with pytest.raises(DataError, match=r"jsonl: changed data.jsonl: .*--data.accept_changes"):
        train(small(**config), resume="auto")
    assert train(small(**config, data__accept_changes=True), resume="auto") == 0
    assert list(losses(folder)) == list(range(1, 21))
    assert "accept_changes" not in (folder / "config.toml").read_text()
    assert train(small(**config), resume="auto") == 0


def test_retries_of_io_errors_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, true, failures = tmp_path / "data.jsonl", files.open_binary, iter([OSError(5, "Input/output error")])

    def fail_once(path: Path) -> IO[bytes]:
        for error in failures:
            raise error
        return true(path)

    monkeypatch.setattr("tercet.data.files.RETRY_SECONDS", (0.01,))
    monkeypatch.setattr(files, "open_binary", fail_once)
    data.write_text(json.dumps({"text": "word " * 400}))
    config = {"data__source": "jsonl", "data__path": [str(data)], "data__validation_fraction": 0.0, "train__steps": 1}
    assert train_small(tmp_path / "run", **config) == 0
    noted = [event.text for event in read_events(events_file(tmp_path / "run")) if isinstance(event, Noted)]
    assert noted == [f"warning: {data} could not be read (Input/output error): retry 1 of 1 after 0.01 s"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A 2 MB file system, if one can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_stops_the_run_with_a_message_and_keeps_the_last_checkpoint(
    fork_server: ForkServer, small_disk: Path
) -> None:
    folder = small_disk / "run"
    config = small(run__dir=str(folder), train__steps=400, checkpoint__every=2, checkpoint__keep=0)
    child = fork_server.run(config)
    assert child.code == 1
    assert "No space left on device" in child.output
    assert "Traceback" not in child.output
    kept = saved_steps(folder)
    assert kept
    assert f"the newest complete checkpoint is {complete_checkpoints(folder / 'checkpoints')[-1]}" in child.output
    # With free space again, it resumes from there.
    for path in complete_checkpoints(folder / "checkpoints")[:-2]:
        shutil.rmtree(path)
    again = small(run__dir=str(folder), train__steps=int(kept[-1] or 0) + 4, checkpoint__every=2, checkpoint__keep=1)
    child = fork_server.run(again, resume="auto")
    assert child.code == 0, child.output
    assert list(losses(folder)) == list(range(1, int(kept[-1] or 0) + 5))


def unsavable(run: Path, step: int) -> Path:
    """A run folder with a file where the checkpoint of this step would be written."""
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / f".writing-step-{step:08d}").write_text("")
    return run


def test_failed_saves_are_tolerated_if_allowed_and_counted(fork_server: ForkServer, tmp_path: Path) -> None:
    folder = unsavable(tmp_path / "run", 2)
    config = small(run__dir=str(folder), checkpoint__every=2, checkpoint__failures_allowed=1)
    child = fork_server.run(config)
    assert child.code == 0, child.output
    failed = events_of(folder, CheckpointFailed)
    assert len(failed) == 1
    assert saved_steps(folder) == [4, 6]
    assert child.output.count("warning: checkpoint of step 2 could not be written") == 1


def test_a_full_disk_is_tolerated_if_failed_saves_are_and_nothing_is_missing_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, full, step = tmp_path / "run", [False], trainer.train_step

    def space_until(write: Callable[..., Any]) -> Callable[..., Any]:
        def limited(*arguments: Any) -> Any:
            if full[0]:
                raise OSError(28, "No space left on device")
            return write(*arguments)

        return limited

    def counted_step(*arguments: Any, **options: Any) -> Any:
        full[0] = 3 <= options["step"] <= 5
        return step(*arguments, **options)

    monkeypatch.setattr(os, "write", space_until(os.write))
    monkeypatch.setattr(HashingFile, "_write_part", space_until(HashingFile._write_part))
    monkeypatch.setattr("tercet.atomic_io.sync", space_until(atomic_io.sync))
    monkeypatch.setattr(trainer, "train_step", counted_step)
    assert train_small(
        folder, train__steps=8, checkpoint__failures_allowed=1, checkpoint__async_save=False, log__tensorboard=True,
    ) == 0  # fmt: skip
    logged = list(read_events(events_file(folder)))
    assert [e.step for e in logged if isinstance(e, CheckpointFailed)] == [4]
    assert [e.step for e in logged if isinstance(e, StepLogged)] == list(losses(folder)) == list(range(1, 9))
    assert saved_steps(folder) == [2, 6, 8]
    board = EventAccumulator(str(folder / "tb")).Reload()
    assert [e.step for e in board.Scalars("train/loss")] == list(range(1, 9))
    output = capsys.readouterr().out
    assert output.count("no space left; events wait in memory") == output.count("is complete again") == 1


def test_a_deleted_event_log_is_noticed(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events_file(copied).unlink()
    assert train_small(copied, train__steps=8, resume="auto") == 0
    assert "events of steps 1 to 6 are lost" in capsys.readouterr().out
    assert any("steps 1 to 6 are missing" in sentence for sentence in record_gaps(read_run(copied)))


def test_a_failed_save_stops_the_run_by_default(fork_server: ForkServer, tmp_path: Path) -> None:
    folder = unsavable(tmp_path / "run", 4)
    child = fork_server.run(small(run__dir=str(folder), checkpoint__every=2))
    assert child.code == 1
    assert "checkpoint of step 4 could not be written" in child.output
    assert "step-00000002" in child.output
    assert saved_steps(folder) == [2]
    assert ended(folder).outcome == "failed"


def test_a_folder_without_permissions_is_one_line(fork_server: ForkServer, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    (tmp_path / "closed").mkdir(mode=0o500)
    child = fork_server.run(small(run__dir=str(tmp_path / "closed" / "run")))
    assert child.code == 2
    assert "cannot be written (Permission denied)" in child.output


def test_a_run_is_not_overwritten(fork_server: ForkServer, copied: Path) -> None:
    config = small(run__dir=str(copied))
    before = losses(copied)
    child = fork_server.run(config)
    assert child.code == 2
    assert (
        f"already holds a run: pick another --run.dir, or resume with: {program()} train --resume auto" in child.output
    )
    assert losses(copied) == before
    child = fork_server.run(config, resume="auto")
    assert child.code == 0
    assert losses(copied) == before


def test_two_processes_do_not_share_a_folder(fork_server: ForkServer, tmp_path: Path) -> None:
    config = small(run__dir=str(tmp_path / "run"), **LONG)
    first = fork_server.start(config)
    first.until("first step after")
    second = fork_server.run(small(run__dir=str(tmp_path / "run")), resume="auto")
    assert second.code == 1
    assert (
        f"is in use by another process (pid {first.pid}): wait for it, stop it with `kill {first.pid}`" in second.output
    )
    first.signal(signal.SIGTERM)
    assert first.wait() == 143


def test_a_damaged_checkpoint_is_skipped_and_the_run_ends_the_same(fork_server: ForkServer, copied: Path) -> None:
    config = small(run__dir=str(copied))
    before = losses(copied)
    newest = complete_checkpoints(copied / "checkpoints")[-1]
    victim = next(newest.glob("*.safetensors"))
    content = bytearray(victim.read_bytes())
    content[-5] ^= 64
    victim.write_bytes(content)
    child = fork_server.run(config, resume="auto")
    assert child.code == 0, child.output
    assert f"skipping a damaged checkpoint: {newest}" in child.output
    assert "resuming from" in child.output
    assert losses(copied) == before
    abandoned = copied / "checkpoints" / f"abandoned-{newest.name}"
    assert abandoned.is_dir()
    # Naming a damaged checkpoint is an error.
    child = fork_server.run(config, resume=str(abandoned))
    assert child.code == 1
    assert "does not match its SHA-256" in child.output


def test_a_damaged_line_in_the_event_log_does_not_prevent_resuming(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = events_file(copied).read_bytes().split(b"\n")
    lines[1] = b"\0" + lines[1][1:]
    events_file(copied).write_bytes(b"\n".join(lines))
    assert train_small(copied, train__steps=8, resume="auto") == 0
    assert capsys.readouterr().out.count("damaged line") == 1
    assert max(losses(copied)) == 8


def test_a_changed_config_is_refused_with_the_difference(fork_server: ForkServer, copied: Path) -> None:
    folder = str(copied)
    child = fork_server.run(small(run__dir=folder, train__lr=0.5, train__steps=8), resume="auto")
    assert child.code == 2
    assert "train.lr was 0.0003, now 0.5" in child.output
    assert "train.steps" not in child.output
    child = fork_server.run(small(run__dir=folder, model__ffn_dim=40), resume="auto")
    assert child.code == 2
    assert "different model: model.ffn_dim was 32, now 40" in child.output
    changed = small(run__dir=folder, train__lr=0.5, train__steps=8, checkpoint__allow_config_change=True)
    child = fork_server.run(changed, resume="auto")
    assert child.code == 0, child.output
    assert "changed since: train.lr was 0.0003, now 0.5" in child.output
    assert "changed since: train.steps was 6, now 8" in child.output
    assert len(losses(copied)) == 8
    saved = (copied / "config.toml").read_text()
    assert "lr = 0.5" in saved
    assert "allow_config_change" not in saved  # it was given for that start only


def test_a_resume_without_a_step_left_does_not_change_the_saved_config(fork_server: ForkServer, copied: Path) -> None:
    before = (copied / "config.toml").read_text()
    changed = small(run__dir=str(copied), train__lr=0.5, checkpoint__allow_config_change=True)
    child = fork_server.run(changed, resume="auto")
    assert child.code == 0, child.output
    assert "nothing left to do" in child.output
    assert (copied / "config.toml").read_text() == before


def test_resuming_another_runs_checkpoint_in_a_used_folder_is_refused(
    fork_server: ForkServer, copied: Path, tmp_path: Path
) -> None:
    a, b = copied, tmp_path / "b"
    assert fork_server.run(small(run__dir=str(b), run__seed=7)).code == 0
    before = losses(b), saved_steps(b)
    source = a / "checkpoints" / "step-00000002"
    for resume in (str(source), str(a)):
        child = fork_server.run(small(run__dir=str(b)), resume=resume)
        assert child.code == 2
        assert f"{b} already holds a run, and --resume {resume} belongs to another one" in child.output
        assert (losses(b), saved_steps(b)) == before
    # Through a symbolic link it is still the run's own checkpoint.
    (tmp_path / "link").symlink_to(a)
    child = fork_server.run(small(run__dir=str(tmp_path / "link")), resume=str(a / "checkpoints" / "latest"))
    assert child.code == 0, child.output


def test_a_fork_saves_the_checkpoint_it_starts_from(fork_server: ForkServer, finished: Path, tmp_path: Path) -> None:
    a, b, c = finished, tmp_path / "b", tmp_path / "c"
    source = str(a / "checkpoints" / "step-00000002")
    # Stopped before its first step, with no save due for long.
    child = fork_server.start(small(run__dir=str(b), **LONG | {"train__warmup_steps": 2}), resume=source)
    child.until("resuming from")
    child.signal(signal.SIGTERM)
    assert child.wait() == 143, child.output
    last = ended(b)
    assert saved_steps(b) == sorted({2, last.step})
    assert f"saved step {last.step} and stopped" in child.output
    # Without a signal it is saved too, and the fork has the losses of the original run.
    assert fork_server.run(small(run__dir=str(c), checkpoint__every=0), resume=source).code == 0
    assert saved_steps(c) == [2, 6]
    assert [losses(c)[step] for step in (3, 4, 5, 6)] == [losses(a)[step] for step in (3, 4, 5, 6)]


def test_a_fork_records_an_absolute_path(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be continued in another working folder."""
    monkeypatch.chdir(finished.parent)
    assert train(small(run__dir=str(tmp_path / "run"), train__steps=7), resume=finished.name) == 0
    (started,) = events_of(tmp_path / "run", RunStarted)
    assert started.resumed_from == str(newest(finished))


def test_a_fork_that_died_before_its_first_save_can_be_started_again(
    fork_server: ForkServer, finished: Path, tmp_path: Path
) -> None:
    a, b = finished, tmp_path / "b"
    source = a / "checkpoints" / "step-00000002"
    forked = small(run__dir=str(b), checkpoint__every=0)
    assert fork_server.run(forked, resume=str(source)).code == 0
    expected = losses(b)
    for path in (b / "checkpoints").iterdir():  # as if it had been killed while it saved
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    child = fork_server.run(forked, resume="auto")  # starting at step 0 would be a different run
    assert child.code == 2
    assert f"{b} was forked from {source} and has no checkpoint" in child.output
    assert f"resume with --resume {source}" in child.output
    other = a / "checkpoints" / "step-00000004"
    assert "already holds a run" in fork_server.run(forked, resume=str(other)).output
    child = fork_server.run(forked, resume=str(source))
    assert child.code == 0, child.output
    assert losses(b) == expected
