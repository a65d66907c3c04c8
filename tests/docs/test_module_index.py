"""docs/modules.md lists every module as its docstring describes it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("module_index", ROOT / "scripts" / "module_index.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_module_lists_are_current():
    script = load_script()
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.fill(page) == page, "run: python scripts/module_index.py"


def test_every_package_has_a_list():
    script = load_script()
    listed = {match[1] for match in script.LISTING.findall(script.PAGE.read_text(encoding="utf-8"))}
    packages = {
        str(init.parent.relative_to(script.SOURCE)) for init in script.SOURCE.rglob("__init__.py")
    }  # the top level is "."
    with_modules = {p for p in packages if any(not f.name.startswith("__") for f in (script.SOURCE / p).glob("*.py"))}
    assert listed == with_modules


def test_every_module_has_a_one_sentence_summary():
    script = load_script()
    for path in script.SOURCE.rglob("*.py"):
        if not path.name.startswith("__"):
            assert re.search(r"\w{3}", script.summary(path)), f"{path}: no docstring"
