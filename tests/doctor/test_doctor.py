"""`tercet doctor` finds problems, names the fix, and survives failing checks."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

import tercet
from runs import GPU_SIZES, small, train_small
from tercet.doctor import kernels, machine, memory
from tercet.doctor.examine import checks, doctor, examine_before_training, exit_code, lines
from tercet.doctor.machine import FAILED, NOT_TESTED, OK, WARNING, Finding, timed
from tercet.errors import TercetError
from tercet.telemetry.hardware import GIB


def test_versions_that_are_too_old_or_missing_are_failures(monkeypatch):
    assert machine.versions().verdict == OK
    monkeypatch.setattr(machine, "NEEDED", (("torch", (99,), None), ("no_such_package", (1,), None)))
    found = machine.versions()
    assert found.verdict == FAILED
    assert "is not >=99" in found.finding
    assert "no_such_package is missing" in found.finding
    assert found.fix


def test_a_gpu_without_triton_is_a_warning(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    assert kernels.parity(small().model).verdict == WARNING


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_step_that_does_not_fit_in_memory_is_a_warning(monkeypatch):
    check = dict(checks(small(train__micro_batch=2**12, train__tokens_per_step=2**18), short=False))["memory"]
    for held, verdict in ((64 * GIB, OK), (2 * GIB, WARNING), (None, NOT_TESTED)):
        monkeypatch.setattr(memory, "host_memory", lambda held=held: held)
        found = check()
        assert found.verdict == verdict
        assert ("--train.micro_batch" in found.fix) == (verdict == WARNING)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_requesting_a_missing_gpu_fails_with_a_fix():
    found = machine.device("cuda")
    assert found.verdict == FAILED
    assert "--run.device cpu" in found.fix


def test_a_folder_that_cannot_be_written_fails(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    found = timed("disk", lambda: machine.disk(blocked / "runs", small(), megabytes=1))
    assert found.verdict == FAILED
    assert found.fix


def test_a_disk_too_small_for_the_checkpoints_fails(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**30, 2**30, 1000))
    found = machine.disk(tmp_path, small(), megabytes=1)
    assert found.verdict == FAILED
    assert "checkpoint.keep" in found.fix
    assert not list(tmp_path.iterdir())  # the test file is deleted


def test_missing_data_fails_in_one_line(tmp_path):
    config = small(data__source="jsonl", data__path=(str(tmp_path / "nowhere.jsonl"),))
    found = timed("data", lambda: machine.data(config))
    assert found.verdict == FAILED
    assert "nowhere.jsonl" in found.finding
    assert "\n" not in found.finding


def test_data_is_read_without_packing_a_shuffle_block(monkeypatch):
    def block(*_):
        raise AssertionError("a whole block was packed for one batch")

    monkeypatch.setattr("tercet.data.loader.pack_shuffled", block)
    assert machine.data(small(data__shuffle_sequences=1000)).verdict == OK


def test_a_vocabulary_that_does_not_fit_fails():
    found = machine.data(small(model__vocab_size=64))
    assert found.verdict == FAILED
    assert "--model.vocab_size" in found.fix


@pytest.mark.parametrize("gate", ["sigmoid", "none"])
@pytest.mark.parametrize("packed", [False, True])
def test_kernels_are_compared_with_the_reference(packed, gate, monkeypatch):
    # Compare the reference with itself: equal up to the rounding of its inputs.
    other = "tercet.attention.operator." + ("nsa_attention" if gate == "none" else "block_sparse_attention")
    monkeypatch.setattr(other, lambda *_, **__: pytest.fail("this model has another operator"))
    model = small(model__gate=gate).model
    here = {"device": "cpu", "length": 64, "backend": "reference", "packed": packed}
    forward, backward, slots = kernels.compare(model, torch.float32, **here)
    assert forward == backward == 0
    assert slots == 1
    forward, backward, _ = kernels.compare(model, torch.bfloat16, **here)
    assert 0 < forward < kernels.TOLERANCE["bfloat16"]
    assert 0 < backward < kernels.TOLERANCE["bfloat16"]


def test_blocks_are_chosen_as_the_model_chooses_them(monkeypatch):
    from tercet.attention import operator

    real, scorers = operator.block_sparse_attention, []
    monkeypatch.setattr(
        operator,
        "block_sparse_attention",
        lambda *tensors, **named: scorers.append(named.get("scorer")) or real(*tensors, **named),
    )
    model = small(model__gate="none", model__selector="own").model
    kernels.compare(model, torch.float32, device="cpu", length=64, backend="reference")
    assert scorers == ["own"] * 3


def test_packed_documents_are_compared_with_max_seqlen_as_in_training(monkeypatch):
    from tercet.attention import operator

    real, bounds = operator.nsa_attention, []

    def watched(*tensors, **named):
        cu = named["cu_seqlens"]
        bounds.append((named["max_seqlen"], None if cu is None else int(cu.diff().max())))
        return real(*tensors, **named)

    monkeypatch.setattr(operator, "nsa_attention", watched)
    for packed in (True, False):
        kernels.compare(small().model, torch.float32, device="cpu", length=64, backend="reference", packed=packed)
    assert len(bounds) == 6
    assert all(given == true and (given is not None) == (i < 3) for i, (given, true) in enumerate(bounds))


def test_long_document_kernels_are_checked_if_training_uses_them():
    pytest.importorskip("triton")
    from tercet.attention.kernels.selected.plan import make_plan
    from tercet.attention.kernels.table import selected_settings

    cfg = tercet.NSAConfig()

    def query_major_only(T, head, longest):
        settings = selected_settings(head, head, torch.bfloat16, cfg.select_block)
        return make_plan((1, T, T, 12, 2, 16, head, head), 2, 3, (64, 1, 2), settings, longest).query_major_forward_only

    for head in (64, 128):
        T = kernels.check_length(cfg, "bfloat16", packed=True)
        assert not query_major_only(T, head, T - T // 4 - 31)
        T = kernels.check_length(cfg, "bfloat16", packed=True, seq_len=2048)
        assert query_major_only(T, head, T - T // 4 - 31), "a short check compiles only what the run will launch"
    assert kernels.check_length(cfg, "bfloat16", packed=True, seq_len=8192) == 8192
    assert kernels.check_length(cfg, "float32", packed=True) == 3072


def test_the_short_check_covers_what_training_runs_and_the_long_one_more(monkeypatch):
    compared = []

    def compare(model, dtype, *, device, packed, length):
        compared.append((dtype, packed))
        return 1e-3, 1e-3, 1.0  # fine for bf16, far off for fp32

    def check(**changes):
        return dict(checks(small(run__device="auto", **changes), short=True))["kernel parity"]()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "compare", compare)
    assert check().verdict == check(train__precision="bf16").verdict == OK
    assert check(train__precision="fp32").verdict == FAILED
    check(data__cross_document_attention=True)
    assert compared == [*[(torch.bfloat16, True)] * 2, (torch.float32, True), (torch.bfloat16, False)]
    del compared[:]
    kernels.parity(small().model)
    assert set(compared) == {(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)}


def test_a_nan_gradient_fails(monkeypatch):
    from tercet.attention import operator

    real = operator.nsa_attention

    def poisoned(*tensors, **named):
        *others, v_window, gates = tensors
        if v_window.dtype == torch.bfloat16:  # the kernels under test; the reference runs in fp32
            v_window = v_window.clone()
            v_window.register_hook(lambda grad: grad * torch.nan)
        return real(*others, v_window, gates, **named)

    monkeypatch.setattr(operator, "nsa_attention", poisoned)
    here = {"device": "cpu", "length": 64, "backend": "reference"}
    forward, backward, _ = kernels.compare(small().model, torch.bfloat16, **here)
    assert forward < kernels.TOLERANCE["bfloat16"]
    assert backward == float("inf")


@pytest.mark.parametrize(
    ("compared", "verdict", "words"),
    [
        ((1e-6, 1e-6, 1.0), OK, "100.000% of selected blocks equal"),
        ((1e-3, 0.5, 1.0), FAILED, "backward 5.0e-01"),
        ((1e-6, float("nan"), 1.0), FAILED, "backward nan"),
        ((1e-6, 1e-6, 0.99), FAILED, "99.000% of selected blocks equal"),
        (kernels.Unsupported("head_dim=7 is odd"), WARNING, "do not support this model: head_dim=7 is odd"),
    ],
)
def test_kernels_that_disagree_fail_and_a_model_they_do_not_support_is_a_warning(monkeypatch, compared, verdict, words):
    def compare(*_, **__):
        if isinstance(compared, Exception):
            raise compared
        return compared

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "compare", compare)
    found = kernels.parity(small().model, short=True)
    assert found.verdict == verdict
    assert words in found.finding
    assert ("model.backend=reference" in found.fix) == (verdict != OK)


def test_an_exception_in_a_check_is_a_finding():
    def breaks() -> Finding:
        raise RuntimeError("two\nlines")

    found = timed("odd", breaks)
    assert (found.check, found.verdict, found.finding) == ("odd", FAILED, "RuntimeError: two lines")
    assert found.fix


def test_only_failures_set_the_exit_code():
    findings = [Finding("a", OK, ""), Finding("b", WARNING, "", "fix"), Finding("c", NOT_TESTED, "")]
    assert exit_code(findings) == 0
    assert exit_code([*findings, Finding("d", FAILED, "", "fix")]) == 1
    assert "→ fix" in lines(findings[1], 5)[1]


def test_the_short_form_prints_json_and_an_exit_code(capsys):
    assert doctor(preset="tiny", short=True, json=True) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {"versions", "device", "disk"} <= {f["check"] for f in findings}
    assert {tuple(f) for f in findings} == {("check", "verdict", "finding", "fix", "seconds")}


def test_a_failed_check_stops_training_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "NEEDED", (("torch", (99,), None),))
    with pytest.raises(TercetError, match=r"doctor: versions: torch .* is not >=99"):
        train_small(tmp_path / "run")
    assert not (tmp_path / "run" / "events_rank0.jsonl").exists()
    assert examine_before_training(small(health__doctor=False), tmp_path) is None


@pytest.mark.gpu
def test_kernels_agree_with_the_reference_on_this_device():
    found = kernels.parity(small(**GPU_SIZES, train__tokens_per_step=1024).model)
    assert found.verdict == OK, found.finding


def test_the_disk_check_uses_the_nearest_existing_folder(tmp_path):
    found = machine.disk(tmp_path / "not" / "made" / "yet", small(), megabytes=1)
    assert found.verdict == OK
    assert str(tmp_path) in found.finding
    assert not (tmp_path / "not").exists()
    assert Path(tmp_path).exists()
