"""A command that is printed can be typed as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tercet.hints import program, python


def make_program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bin_folder(tmp_path, monkeypatch) -> Path:
    """An environment in the current folder that is not active, whose tercet has been started by its path."""
    theirs, own = tmp_path / "usr" / "bin", tmp_path / "here" / ".venv" / "bin"
    for name in ("tercet", "torchrun"):
        make_program(own / name)
    (own / "python").symlink_to(make_program(theirs / "python"))
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", str(theirs))
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.setattr(sys, "argv", [".venv/bin/tercet", "train"])
    return own


def test_what_is_not_on_the_path_is_named_by_where_it_lies(bin_folder, tmp_path, monkeypatch):
    assert (program(), program("torchrun"), python()) == (".venv/bin/tercet", ".venv/bin/torchrun", ".venv/bin/python")
    monkeypatch.chdir(bin_folder)
    monkeypatch.setattr(sys, "argv", ["tercet"])
    assert program() == "./tercet"
    (tmp_path / "else where").mkdir()
    monkeypatch.chdir(tmp_path / "else where")
    assert program() == str(bin_folder / "tercet")


def test_a_folder_with_a_space_is_quoted(bin_folder, tmp_path, monkeypatch):
    make_program(tmp_path / "my tools" / "tercet")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "my tools" / "tercet")])
    assert program() == f"'{tmp_path}/my tools/tercet'"


def test_in_an_active_environment_the_name_is_enough(bin_folder, monkeypatch):
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    assert (program(), program("torchrun"), python()) == ("tercet", "torchrun", "python")


def test_what_is_linked_from_the_path_is_found_there(bin_folder, tmp_path):
    (tmp_path / "usr" / "bin" / "tercet").symlink_to(bin_folder / "tercet")
    assert program() == "tercet"


def test_a_program_of_another_environment_is_not_used(bin_folder, tmp_path):
    make_program(tmp_path / "usr" / "bin" / "tercet")
    assert program() == ".venv/bin/tercet"


def test_what_was_started_as_a_module_is_named_as_one(bin_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "src" / "tercet" / "__main__.py")])
    assert program() == ".venv/bin/python -m tercet"
    assert program("torchrun") == ".venv/bin/torchrun"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "usr" / "bin" / "python"))
    assert program() == "python -m tercet"


def test_without_scripts_modules_are_named(bin_folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["a_program_of_mine.py"])
    assert program() == ".venv/bin/tercet"
    for name in ("tercet", "torchrun"):
        (bin_folder / name).unlink()
    assert (program(), program("torchrun")) == (
        ".venv/bin/python -m tercet",
        ".venv/bin/python -m torch.distributed.run",
    )


@pytest.mark.parametrize("as_module", [False, True])
def test_the_commands_under_the_list_of_presets_are_taken_as_printed(as_module):
    script = Path(sys.executable).with_name("tercet")
    if not as_module and not script.exists():
        pytest.skip("tercet is not installed here, only on the path of modules")
    started = [sys.executable, "-m", "tercet"] if as_module else [str(script)]
    options = {"env": os.environ | {"PATH": "/usr/bin:/bin"}, "capture_output": True, "text": True, "check": True}
    printed = subprocess.run([*started, "presets"], **options).stdout
    (shown,) = re.findall("See one:  (.*) --preset NAME", printed)
    assert 'name = "tiny"' in subprocess.run(f"{shown} --preset tiny", shell=True, **options).stdout
