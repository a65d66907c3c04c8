"""Atomic writes: a file has its old content or its new content, never part of either."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

from tercet import atomic_io


def test_a_failed_write_keeps_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    atomic_io.write_text(path, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_io.write_text(path, "new, and longer")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["config.toml"]


def test_the_file_appears_only_when_it_is_complete(tmp_path):
    path = tmp_path / "env.json"
    with atomic_io.atomic_write(path) as temporary:
        temporary.write_text("{")
        assert not path.exists()
        temporary.write_text("{}")
    assert json.loads(path.read_text()) == {}
    assert atomic_io.sha256(path) == hashlib.sha256(b"{}").hexdigest()
