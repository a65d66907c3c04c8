"""Text for the terminal: control characters from files and models are shown, not executed."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Escape everything that is not printable, except newline and tab: ESC becomes `\x1b`."""
    return "".join(c if c in "\n\t" or c.isprintable() else ascii(c)[1:-1] for c in text)
