"""One run as one HTML file that needs nothing else, as Markdown, and as verdict.json."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from tercet.errors import TercetError
from tercet.report.facts import gather
from tercet.report.gates import GO, NO_GO, NOT_TESTED
from tercet.report.plots import all_plots
from tercet.report.read import Run
from tercet.report.verdict import Verdict
from tercet.version import __version__

SIGNS = {GO: "go", NO_GO: "no", NOT_TESTED: "nt"}


def environment() -> Any:
    """Templates with every text escaped; only drawings and the style sheet, which are ours, are not."""
    try:
        from jinja2 import DictLoader, Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError:
        raise TercetError("the report's page needs jinja2: pip install 'tercet[report]'") from None
    folder = resources.files("tercet.report") / "page"
    pages = {f.name: f.read_text(encoding="utf-8") for f in folder.iterdir() if f.name.endswith(".html")}
    made = Environment(
        loader=DictLoader(pages), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters["sign"] = SIGNS.__getitem__
    made.filters["drawing"] = Markup
    made.filters["sentence"] = _sentence
    made.globals["style"] = Markup((folder / "style.css").read_text(encoding="utf-8"))
    made.globals["version"] = __version__
    return made


def page(run: Run, verdict: Verdict, twin: Run | None = None) -> str:
    """The HTML of one run."""
    drawn = all_plots(run, verdict.findings, twin)
    facts = gather(run, verdict.findings, twin)
    anchors = {p.anchor: "plot" for p in drawn} | ({"routes": "table"} if facts.routes else {})
    html: str = (
        environment()
        .get_template("run.html")
        .render(
            run=run,
            verdict=verdict,
            facts=facts,
            plots=drawn,
            anchors=anchors,
            objections=verdict.objections(),
            gaps=verdict.gaps(),
        )
    )
    return html.lstrip()


def markdown(run: Run, verdict: Verdict, twin: Run | None = None) -> str:
    """The same in a few lines, for a pull request or a mail."""
    facts = gather(run, verdict.findings, twin)
    lines = [
        f"# {verdict.verdict}: {_plain(run.name)}",
        "",
        _plain(verdict.sentence),
        "",
        f"{_plain(facts.subtitle)}. {_plain(facts.when)}. Folder `{_plain(str(run.folder))}`.",
        "",
        "| " + " | ".join(_plain(f.name) for f in facts.figures) + " |",
        "|" + "---|" * len(facts.figures),
        "| " + " | ".join(_plain(f"{f.value} ({f.note})" if f.note else f.value) for f in facts.figures) + " |",
        "",
        "| gate | verdict | why | needs |",
        "|---|---|---|---|",
        *(f"| {g.name} | **{g.verdict}** | {_plain(g.sentence)} | {_plain(g.threshold)} |" for g in verdict.gates),
    ]
    lists = (("What speaks against it", verdict.objections()), ("Not tested, and how to test it", verdict.gaps()))
    for title, reasons in lists:
        lines += ["", f"## {title}", ""] if reasons else []
        for sentence, mend, names in reasons:
            how = f" → {_plain(mend)}" if mend else ""
            lines.append(f"- **{', '.join(names)}**: {_plain(sentence)}{how}")
    trouble = [n for n in facts.notes if n["sign"] in ("no", "nt")]
    if trouble:
        lines += ["", "## Events of note", ""]
        lines += [f"- step {n['step']}, rank {n['rank']}: {n['kind']}: {_plain(n['text'])}" for n in trouble[:40]]
    return "\n".join(lines) + "\n"


def write(run: Run, verdict: Verdict, out: Path, twin: Run | None = None) -> Path:
    """report.html, report.md and verdict.json in `out`; returns the page."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        target = out / "report.html"
        target.write_text(page(run, verdict, twin), encoding="utf-8")
        (out / "report.md").write_text(markdown(run, verdict, twin), encoding="utf-8")
        text = json.dumps(verdict.as_dict(run), indent=1, ensure_ascii=False)
        (out / "verdict.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise TercetError(f"{out}: the report cannot be written ({error.strerror}): pick another --out") from None
    return target


def _sentence(text: str) -> str:
    """With a capital letter, unless it begins with the name of a file or a key."""
    first = text.split(" ", 1)[0]
    return text if any(c in first for c in "._=/") else text[:1].upper() + text[1:]


def _plain(text: str) -> str:
    """Text of a run in Markdown: no markup, no table cells, no line ends of its own."""
    escaped = "".join("\\" + c if c in "\\`*_|[]#" else c for c in " ".join(text.split()))
    return escaped.replace("<", "&lt;").replace(">", "&gt;")
