"""Commands that messages suggest can be run as printed, also without an active environment."""

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
    """An environment in the current folder that is not active."""
    theirs, own = tmp_path / "usr" / "bin", tmp_path / "my tools" / ".venv" / "bin"
    for name in ("tercet", "torchrun"):
        make_program(own / name)
    (own / "python").symlink_to(make_program(theirs / "python"))
    monkeypatch.chdir(tmp_path / "my tools")
    monkeypatch.setenv("PATH", str(theirs))
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    return own


def test_what_is_not_on_the_path_is_a_module_of_this_python(bin_folder, tmp_path, monkeypatch):
    module = "./.venv/bin/python -m"
    assert (program(), program("torchrun")) == (f"{module} tercet", f"{module} torch.distributed.run")
    monkeypatch.chdir(tmp_path)
    assert program() == "'./my tools/.venv/bin/python' -m tercet"
    monkeypatch.chdir(tmp_path / "usr")
    assert python() == f"'{bin_folder}/python'"


def test_in_an_active_environment_the_name_is_enough(bin_folder, monkeypatch):
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    assert (program(), program("torchrun"), python()) == ("tercet", "torchrun", "python")


def test_what_is_linked_from_the_path_is_found_there(bin_folder, tmp_path):
    (tmp_path / "usr" / "bin" / "tercet").symlink_to(bin_folder / "tercet")
    assert program() == "tercet"


def test_a_program_of_another_environment_is_not_used(bin_folder, tmp_path):
    make_program(tmp_path / "usr" / "bin" / "tercet")
    assert program() == "./.venv/bin/python -m tercet"


def test_the_commands_under_the_list_of_presets_are_taken_as_printed():
    options = {"env": os.environ | {"PATH": "/usr/bin:/bin"}, "capture_output": True, "text": True, "check": True}
    printed = subprocess.run([sys.executable, "-m", "tercet", "presets"], **options).stdout
    (shown,) = re.findall("See one:  (.*) --preset NAME", printed)
    assert 'name = "tiny"' in subprocess.run(f"{shown} --preset tiny", shell=True, **options).stdout
