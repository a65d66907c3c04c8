"""The performance page, the README's table and its plot are what scripts/tables.py generates."""

from __future__ import annotations

import re

import tables


def test_pages_and_the_plot_are_up_to_date() -> None:
    stale = [str(file.relative_to(tables.ROOT)) for file in tables.outdated()]
    assert stale == [], "run python scripts/tables.py"


def test_every_table_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)
    assert set(re.findall(r"<!-- table:([\w-]+) -->", text)) == tables.TABLES.keys()
