"""Plain text of the documentation in Debian packages, as JSON lines.

python scripts/manuals_text.py FOLDER-OF-DEBS OUT.jsonl

Reads HTML, man pages, text, RST, Markdown, POD and Info files of each package. Leaves out indexes, change logs,
licences and what is not English prose, and at most `--most` megabytes per package, so that none dominates.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

COMMON = frozenset(
    re.findall(r"\w+", "the of to a and in is for be that this with are as it on by or an can from not if")
)
LEFT_OUT = re.compile(
    r"/_sources/|/_static/|/_modules/|/src/|changelog|copyright|licen[cs]e|/NEWS|/(py-)?(gen|mod)?index[-_.]|search|"
    r"/doc-index|all-?classes|allitems|alphabetical|/(cs|da|de|el|es|fi|fr|hu|it|ja|ko|nl|no|pl|pt|pt_BR|ro|ru|sv|tr|uk|zh|"
    r"zh_CN|zh_TW|[a-z]{2}-[A-Z]{2})/|[._-](cs|da|de|es|fi|fr|hu|it|ja|ko|nl|pl|pt|pt_BR|ru|sv|tr|uk|zh)\.",
    re.IGNORECASE,
)
DROPPED = re.compile(r"<!--|<(script|style|nav|head|header|footer|svg|form|select|button|math)\b", re.IGNORECASE)
MAIN = re.compile(
    r"<main\b|<article\b|role=[\"']main[\"']|<div[^>]*\bclass=[\"'](?:body|document|content)\b", re.IGNORECASE
)
PRE = re.compile(r"(<pre\b.*?</pre\s*>)", re.DOTALL | re.IGNORECASE)
BLOCK = re.compile(r"</?(?:p|div|h\d|li|ul|ol|dl|dt|dd|tr|table|section|blockquote|br|hr|pre)\b[^>]*>", re.IGNORECASE)
TAG = re.compile(r"<[^>]*>")
ROFF_INLINE = re.compile(r"\\f(?:\[[^]]*\]|\(..|.)|\\s[-+]?\d|\\[&|^/,%!]|\\\*\(..|\\\*.")
ROFF_CHARACTERS = {r"\-": "-", r"\(bu": "*", r"\(em": "--", r"\(aq": "'", r"\(dq": '"', r"\e": "\\", r"\ ": " "}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("debs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--most", type=float, default=6.0, help="megabytes of text per package")
    args = parser.parse_args()
    total = 0
    with args.out.open("w", encoding="utf-8") as out:
        for deb in sorted(args.debs.glob("*.deb")):
            package = deb.name.partition("_")[0]
            documents = package_documents(deb, args.most * 1e6)
            for name, text in documents:
                out.write(json.dumps({"package": package, "file": name, "text": text}) + "\n")
            size = sum(len(text) for _, text in documents)
            total += size
            print(f"{package}: {len(documents):,} documents, {size / 1e6:.1f} of {total / 1e6:.0f} MB", flush=True)
    return 0


def package_documents(deb: Path, most: float) -> list[tuple[str, str]]:
    """(file, text) of a package's documents, in an order by hash of their names, up to `most` characters."""
    found, size = [], 0
    for name, content in files(deb):
        text = extract(name, content)
        if text is not None and is_prose(text):
            found.append((name, text))
            size += len(text)
            if size > 2 * most:  # enough to choose from
                break
    # Lines of navigation and footers that many pages of a package repeat.
    pages = Counter(line for _, text in found for line in set(text.splitlines()) if len(line) >= 30)
    kept, size = [], 0
    for name, text in sorted(found, key=lambda each: hashlib.sha256(each[0].encode()).digest()):
        text = squeeze("\n".join(line for line in text.splitlines() if pages[line] <= 10))
        if is_prose(text) and size + len(text) <= most:
            kept.append((name, text))
            size += len(text)
    return kept


def files(deb: Path) -> Iterator[tuple[str, bytes]]:
    """Documentation files of a package, decompressed."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE) as process:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                for member in archive:
                    name = member.name.removesuffix(".gz")
                    if not member.isfile() or kind_of(name) is None or LEFT_OUT.search(name) or member.size > 4_000_000:
                        continue
                    content = archive.extractfile(member).read()  # type: ignore[union-attr]
                    yield name, gzip.decompress(content) if member.name.endswith(".gz") else content
        finally:
            process.kill()  # the caller may have enough


def kind_of(name: str) -> str | None:
    if re.search(r"/man/man\d\w*/", name):
        return "man"
    suffix = name.rpartition(".")[2].lower()
    if suffix in ("html", "htm", "xhtml", "page", "xhp"):
        return "html"
    if suffix in ("txt", "rst", "md", "info", "pod") or re.search(r"\.info-\d+$", name):
        return "text"
    return None


def extract(name: str, content: bytes) -> str | None:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    kind = kind_of(name)
    if kind == "html":
        return squeeze(html_text(text))
    return squeeze(roff_text(text) if kind == "man" else text.replace("\x1f", "\n"))


def html_text(page: str) -> str:
    page = without_dropped(page)
    if start := MAIN.search(page):
        page = page[page.find(">", start.end() - 1) + 1 :]
    parts = []
    for part in PRE.split(page):
        if part[:4].lower() != "<pre":
            part = BLOCK.sub("\n", re.sub(r"\s+", " ", part))
        parts.append(html.unescape(TAG.sub("", part)).replace("\N{PILCROW SIGN}", "").replace("\xa0", " "))
    return "\n".join(parts)


def without_dropped(page: str) -> str:
    """The page without comments and the elements that DROPPED names; an opening tag that nothing closes stays."""
    lower, parts, at, unclosed = page.lower(), [], 0, set()
    while match := DROPPED.search(page, at):
        close = "-->" if match[1] is None else f"</{match[1].lower()}"
        end = -1 if close in unclosed else lower.find(close, match.end())
        parts.append(page[at : match.start()])
        if end < 0:
            unclosed.add(close)
            at = match.end()
        else:
            at = lower.find(">", end) + 1 or len(page)
    return "".join(parts) + page[at:]


def roff_text(page: str) -> str:
    """A man page without its macros; headings and tagged paragraphs on lines of their own."""
    lines = []
    title = re.search(r"^\.(TH|Dd)\b", page, re.MULTILINE)  # definitions of macros come before it
    for line in page[title.start() if title else 0 :].splitlines():
        if line.startswith(('.\\"', "'\\\"")):
            continue
        macro, _, rest = line.partition(" ") if line.startswith((".", "'")) else ("", "", line)
        if macro in (".SH", ".SS", ".Sh", ".Ss", ".PP", ".P", ".LP", ".TP", ".IP", ".Pp", ".It"):
            lines.append("")
        elif macro in (".de", ".ds", ".if", ".ie", ".el", ".nr", ".TH", ".Dd", ".Dt", ".Os", ".tr", ".so", ".ft"):
            continue
        rest = ROFF_INLINE.sub("", rest).replace('"', "" if macro else '"')
        for escape, character in ROFF_CHARACTERS.items():
            rest = rest.replace(escape, character)
        if rest or not macro:
            lines.append(rest)
    return "\n".join(lines)


def squeeze(text: str) -> str:
    """Without trailing blanks, and with at most one empty line in a row."""
    text = re.sub(r"[ \t]+$", "", text.replace("\r\n", "\n"), flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def is_prose(text: str) -> bool:
    """English sentences, not an index, a table or another language."""
    if not 1000 <= len(text) <= 1_000_000 or "\x00" in text:
        return False
    words = re.findall(r"[a-z]+", text.lower())
    if len(words) < 150 or len(text.encode()) > 1.05 * len(text):
        return False
    return sum(word in COMMON for word in words) >= 0.12 * len(words)


if __name__ == "__main__":
    sys.exit(main())
