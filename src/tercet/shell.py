"""How to start `tercet` from the user's shell: by name, by path or with `python -m`."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

_MODULES = {"tercet": "tercet", "torchrun": "torch.distributed.run"}


def program(name: str = "tercet") -> str:
    """How to start a program of this environment from the current folder, quoted for a shell."""
    started = Path(sys.argv[0])
    script = started if started.name == name and started.is_file() else Path(sys.executable).with_name(name)
    found = shutil.which(name)
    # PATH may lead to another environment's program: compare the files.
    if found and script.is_file() and os.path.samefile(found, script):
        return name
    as_module = started.name == "__main__.py" and started.parent.name == name
    return f"{python()} -m {_MODULES[name]}" if as_module or not script.is_file() else _quoted(script)


def python() -> str:
    """How to start this Python."""
    here = Path(sys.executable)
    found = shutil.which(here.name)
    # Compare folders, not files: a virtual environment's Python is a link to the base interpreter.
    same = found is not None and Path(found).parent.resolve() == here.parent.resolve()
    return here.name if same else _quoted(here)


def _quoted(path: Path) -> str:
    path, here = path.absolute(), Path.cwd()
    if path.is_relative_to(here):
        path = path.relative_to(here)
    return shlex.quote(str(path) if len(path.parts) > 1 else f"./{path}")
