"""Writes the module lists of docs/modules.md from the modules' docstrings.

Usage: python scripts/module_index.py [--check]
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tercet"
PAGE = ROOT / "docs" / "modules.md"
LISTING = re.compile(r"(<!-- modules:(\S+) -->\n).*?(<!-- /modules -->)", re.DOTALL)


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, up to its first full stop."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Za-z])", paragraph)[0].rstrip(".")


def listing(package: str) -> str:
    """One item per module of a package, e.g. `attention` or `attention/kernels`; `.` is the top level."""
    modules = sorted(path for path in (SOURCE / package).glob("*.py") if not path.name.startswith("__"))
    items = (f"- `{path.name}`: {summary(path)}" for path in modules)
    return "\n".join(textwrap.fill(item, 118, subsequent_indent="  ", break_on_hyphens=False) for item in items) + "\n"


def fill(page: str) -> str:
    return LISTING.sub(lambda found: found[1] + "\n" + listing(found[2]) + "\n" + found[3], page)


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        return 0 if fill(page) == page else 1
    PAGE.write_text(fill(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
