"""Commands as they can be typed: where no environment is active, the name alone is not found."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

_MODULES = {"tercet": "tercet", "torchrun": "torch.distributed.run"}


def typed(program: str = "tercet") -> str:
    """The words by which a program of this environment is called from the current folder, ready for a shell."""
    started = Path(sys.argv[0])
    script = started if started.name == program and started.is_file() else Path(sys.executable).with_name(program)
    found = shutil.which(program)
    # One of another environment may be found first: it is not the one that speaks here.
    if found and script.is_file() and os.path.samefile(found, script):
        return program
    as_module = started.name == "__main__.py" and started.parent.name == program
    return f"{python()} -m {_MODULES[program]}" if as_module or not script.is_file() else _shown(script)


def python() -> str:
    """The same of this Python."""
    here = Path(sys.executable)
    found = shutil.which(here.name)
    # By the folder: the Python of an environment is a link to one that knows nothing of it.
    same = found is not None and Path(found).parent.resolve() == here.parent.resolve()
    return here.name if same else _shown(here)


def _shown(path: Path) -> str:
    path, here = path.absolute(), Path.cwd()
    if path.is_relative_to(here):
        path = path.relative_to(here)
    return shlex.quote(str(path) if len(path.parts) > 1 else f"./{path}")
