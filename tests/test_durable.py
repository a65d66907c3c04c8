"""A file is the old one or the new one, never something between."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

from tercet import atomic_io as durable


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    durable.write_text(path, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        durable.write_text(path, "new, and longer")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["config.toml"]


def test_the_new_content_has_its_name_only_when_it_is_whole(tmp_path):
    path = tmp_path / "env.json"
    with durable.replacing(path) as temporary:
        temporary.write_text("{")
        assert not path.exists()
        temporary.write_text("{}")
    assert json.loads(path.read_text()) == {}
    assert durable.sha256(path) == hashlib.sha256(b"{}").hexdigest()
