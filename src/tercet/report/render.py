"""Write the report of one run: a self-contained HTML page, Markdown, and verdict.json."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from tercet.errors import TercetError
from tercet.report.facts import collect_facts
from tercet.report.figure import POINTS
from tercet.report.gates import GO, NO_GO, NOT_APPLICABLE, NOT_TESTED
from tercet.report.plots import all_plots
from tercet.report.read import Run
from tercet.report.verdict import HEALTHY, Verdict
from tercet.terminal import printable
from tercet.version import __version__

# Verdict -> CSS class
SIGNS = {GO: "go", NO_GO: "no", NOT_TESTED: "nt", NOT_APPLICABLE: "na"}
# Evidence keys are part of verdict.json and stay as they are; the page shows clearer labels for these.
EVIDENCE_LABELS = {
    "dense twin": "dense baseline",
    "readings": "samples",
    "recordings that failed": "failed CUDA graph captures",
    "standing still": "blocked on saves",
}


def render_page(template: str, **content: Any) -> str:
    """A page of page/. Everything is escaped except our own SVG and style sheet."""
    try:
        from jinja2 import DictLoader, Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError:
        raise TercetError("the report page needs jinja2: pip install 'tercet[report]'") from None
    folder = resources.files("tercet.report") / "page"
    pages = {f.name: f.read_text(encoding="utf-8") for f in folder.iterdir() if f.name.endswith(".html")}
    env = Environment(
        loader=DictLoader(pages), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    env.filters["sign"] = SIGNS.__getitem__
    env.filters["banner"] = banner_class
    env.filters["svg"] = Markup
    env.filters["sentence"] = _capitalize
    env.filters["label"] = lambda name: EVIDENCE_LABELS.get(name, name)
    env.globals["style"] = Markup((folder / "style.css").read_text(encoding="utf-8"))
    env.globals["version"] = __version__
    html: str = env.get_template(template).render(content)
    return html.lstrip()


def banner_class(verdict: Verdict) -> str:
    """CSS class of the banner: that of the verdict, or `ok` for a healthy run that is not GO."""
    return "ok" if verdict.verdict == NOT_TESTED and verdict.health == HEALTHY else SIGNS[verdict.verdict]


def html_page(run: Run, verdict: Verdict, baseline: Run | None = None) -> str:
    plots = all_plots(run, verdict.findings, baseline)
    facts = collect_facts(run, verdict.findings, baseline)
    anchors = {p.anchor: "plot" for p in plots} | ({"routes": "table"} if facts.routes else {})
    thinned = POINTS if len(run.losses) > POINTS else 0
    return render_page("run.html", thinned=thinned, run=run, verdict=verdict, facts=facts, plots=plots, anchors=anchors)


def markdown(run: Run, verdict: Verdict, baseline: Run | None = None) -> str:
    """A short version for pull requests and mail."""
    facts = collect_facts(run, verdict.findings, baseline)
    lines = [
        f"# {escape(verdict.headline)}",
        "",
        f"{escape(run.name)}, production gates: {verdict.verdict}. {escape(verdict.sentence)}",
        "",
        f"{escape(facts.subtitle)}. {escape(facts.period)}. Folder `{escape(str(run.folder))}`.",
        "",
        "| " + " | ".join(escape(f.name) for f in facts.figures) + " |",
        "|" + "---|" * len(facts.figures),
        "| " + " | ".join(escape(f"{f.value} ({f.note})" if f.note else f.value) for f in facts.figures) + " |",
        "",
        "| gate | verdict | why | needs |",
        "|---|---|---|---|",
        *(f"| {g.name} | **{g.verdict}** | {escape(g.sentence)} | {escape(g.threshold)} |" for g in verdict.gates),
    ]
    listed = {
        "Failed": verdict.reasons(NO_GO),
        "Warnings": verdict.warnings(),
        "Not tested": verdict.reasons(NOT_TESTED),
        "Not applicable": verdict.reasons(NOT_APPLICABLE),
    }
    for title, reasons in listed.items():
        lines += ["", f"## {title}", ""] if reasons else []
        for sentence, fix, names in reasons:
            arrow = f" → {escape(fix)}" if fix else ""
            lines.append(f"- **{', '.join(names)}**: {escape(sentence)}{arrow}")
    problems = [e for e in facts.notable_events if e["sign"] in ("no", "nt")]
    if problems:
        lines += ["", "## Notable events", ""]
        lines += [
            f"- step {e['step']}, rank {e['rank']}: {escape(e['kind'])}: {escape(e['text'])}" for e in problems[:40]
        ]
    return "\n".join(lines) + "\n"


def write_report(run: Run, verdict: Verdict, out: Path, baseline: Run | None = None) -> Path:
    """Write the report of one run to `out`; returns the path of the page."""
    record = json.dumps(verdict.as_dict(run), indent=1, ensure_ascii=False)
    return write_files(out, html_page(run, verdict, baseline), markdown(run, verdict, baseline), record)


def write_files(out: Path, page: str, text: str, record: str) -> Path:
    """Write report.html, report.md and verdict.json to `out`; returns the path of the page."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.html").write_text(page, encoding="utf-8")
        (out / "report.md").write_text(text, encoding="utf-8")
        (out / "verdict.json").write_text(record + "\n", encoding="utf-8")
    except OSError as error:
        raise TercetError(f"cannot write the report to {out} ({error.strerror}): pick another --out") from None
    return out / "report.html"


def _capitalize(text: str) -> str:
    """Capitalize the first letter, unless the first word is a file name or a configuration key."""
    first = text.split(" ", 1)[0]
    return text if any(c in first for c in "._=/") else text[:1].upper() + text[1:]


def escape(text: str) -> str:
    """Escape text for Markdown: no markup, no table separators, no line breaks."""
    escaped = "".join("\\" + c if c in "\\`*_|[]#" else c for c in printable(" ".join(text.split())))
    return escaped.replace("<", "&lt;").replace(">", "&gt;")
