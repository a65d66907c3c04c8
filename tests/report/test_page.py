"""The report page: self-contained, escaped, and written for every kind of run."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from tercet.errors import UsageError
from tercet.report import pages
from tercet.report.commands import report
from tercet.report.pages import key_figures
from tercet.report.plots import VARIABLES, loss_limits
from tercet.report.read import read_run
from tercet.telemetry.sinks import summarise
from watched import copy, each, gate, verdict

NASTY = '<script>alert("x")</script> & <img src=http://evil.example/x.png> $\\frac$ | `rm`'


class Tags(HTMLParser):
    """Every tag with its attributes, and the text between them."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.ids = [], "", []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def no_plots(monkeypatch):
    """Pages without plots: drawing is slow."""
    monkeypatch.setattr(pages, "all_plots", lambda *_: [])


@pytest.fixture(scope="module")
def page(healthy):
    return pages.html_page(healthy, verdict(healthy))


def test_the_page_loads_nothing_external(page):
    for tag, attrs in Tags(page).tags:
        assert tag not in ("script", "iframe", "object", "embed")
        for name in ("src", "href", "xlink:href", "data", "action", "srcset"):
            value = attrs.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_every_internal_link_has_a_target(page):
    tags = Tags(page).tags
    ids = {attrs["id"] for _, attrs in tags if "id" in attrs}
    for _, attrs in tags:
        if attrs.get("href", "").startswith("#"):
            assert attrs["href"][1:] in ids


def test_plots_take_their_colours_from_the_page_and_are_readable_on_a_phone(page):
    assert not [c for c in VARIABLES if c in page]
    assert "prefers-color-scheme: dark" in page
    drawings = re.findall(r'<svg[^>]*viewBox="0 0 ([\d.]+) [^>]*>(.*?)</svg>', page, re.S)
    assert len(drawings) == 7
    for width, drawing in drawings:
        smallest = min(float(size) for size in re.findall(r"font-size: ([\d.]+)px", drawing))
        assert smallest * 340 / float(width) >= 10  # px on a screen of 390


def test_all_text_of_a_run_is_escaped(healthy, tmp_path, no_plots):
    def nasty(lines):
        for line in lines:
            for field in ("name", "reason", "text", "prompt", "path"):
                if field in line:
                    line[field] = NASTY
        lines.insert(-1, lines[-1] | {"kind": "note", "text": NASTY})

    found = copy(healthy, tmp_path / "run", nasty)
    for file, key in (("env.json", "host"), ("origins.json", "train.lr")):
        (found.folder / file).write_text(json.dumps({key: NASTY}))
    found = read_run(found.folder)
    judged = verdict(found)
    page = pages.html_page(found, judged)
    parsed = Tags(page)
    assert not [t for t, _ in parsed.tags if t == "script"]
    assert not [a for t, a in parsed.tags if t == "img"]
    assert parsed.text.count('<script>alert("x")</script>') >= 4  # shown as text


def test_a_loss_on_the_page_names_its_steps(healthy):
    losses = [x for e in healthy.steps for x in e.losses]
    assert len(losses) == 60
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    (figure,) = [f for f in key_figures(healthy) if f.name == "training loss"]
    note = f"mean of the last 5 steps; {losses[-1]:.4f} in the last, {losses[0]:.4f} in the first"
    assert (figure.value, figure.note) == (f"{last:.4f}", note)
    assert summarise(healthy.events[0])["smoothed_loss"] == pytest.approx(last)  # and the run's last line says it
    judged = gate(verdict(healthy), "stability")
    shown = f"{first:.4f} → {last:.4f} (means of the first 5 and the last 5 steps)"
    assert ("training loss", shown) in judged.evidence
    assert shown in judged.sentence


def test_failures_are_listed_at_the_top_with_their_fix(healthy, tmp_path, no_plots):
    found = copy(healthy, tmp_path / "run", lambda lines: lines.pop())
    judged = verdict(found)
    text = Tags(pages.html_page(found, judged)).text
    assert judged.reasons("NO-GO")
    for reason, fix, names in judged.reasons("NO-GO"):
        assert "stability" in names
        assert text.lower().index(reason.lower()) < text.index("Not applicable to this run")
        assert fix in text
    assert "died after step" in text
    assert "Failed, and how to fix it" not in Tags(pages.html_page(healthy, verdict(healthy))).text


def test_only_the_initial_descent_is_cut_off(healthy):
    def limits(*losses):
        steps = [dataclasses.replace(healthy.steps[0], step=400, first_step=1, losses=list(losses))]
        others = [e for e in healthy.events[0] if e.kind not in ("step", "validation")]
        return loss_limits([dataclasses.replace(healthy, events={0: [*others, *steps]})])

    falling = [9.0 - 0.4 * i for i in range(20)]
    low, high = limits(*falling, *[1.5, 1.2] * 190)
    assert 1.1 < low < 1.2
    assert 1.5 < high < 1.6
    assert limits(*falling, *[1.5] * 300, 7.0, *[1.5] * 79)[1] > 7.0  # a spike stays visible
    assert limits(*falling) == (None, None)


def test_a_run_that_has_only_started_gets_a_page(healthy, tmp_path):
    def only_started(lines):
        del lines[1:]

    found = copy(healthy, tmp_path / "run", only_started)
    judged = verdict(found)
    assert judged.verdict == "NO-GO"
    assert "no steps were logged" in Tags(pages.html_page(found, judged)).text


def test_the_command_writes_page_and_verdict(healthy, tmp_path, capsys):
    assert report([healthy.folder], out=tmp_path / "out") == 0
    told = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert told["verdict"] == "NOT TESTED"
    assert told["run"]["step"] == 60
    assert {g["name"] for g in told["gates"]} >= {"stability", "routing", "numerics"}
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")
    assert re.search(r"^  NOT APPLICABLE +routing ", out := capsys.readouterr().out, re.M)
    assert out.splitlines()[-3] == told["headline"]
    assert told["headline"].startswith("Healthy: 60 steps, validation ")


def test_only_a_failure_fails_unless_go_is_required(healthy, tmp_path, monkeypatch, no_plots):
    def codes(*judged):
        found = iter(judged * 2)
        monkeypatch.setattr("tercet.report.commands.judge", lambda *_: dataclasses.replace(base, verdict=next(found)))
        runs = [healthy.folder, copy(healthy, tmp_path / "-".join(judged)).folder][: len(judged)]
        return report(runs, out=tmp_path / "out"), report(runs, out=tmp_path / "out", require_go=True)

    base = verdict(healthy)
    assert codes("GO") == (0, 0)
    assert codes("NOT TESTED") == (0, 4)
    assert codes("NO-GO") == (3, 3)
    assert codes("GO", "NOT TESTED") == (0, 4)
    assert codes("NO-GO", "NOT TESTED") == (3, 3)


def test_two_runs_are_compared_with_their_differences(healthy, tmp_path, no_plots, capsys):
    other = copy(healthy, tmp_path / "other", each("run_started", name=NASTY))
    text = (other.folder / "config.toml").read_text()
    (other.folder / "config.toml").write_text(text.replace('attention = "nsa"', 'attention = "dense"'))
    code = report([healthy.folder, other.folder], out=tmp_path / "both")
    page = (tmp_path / "both" / "report.html").read_text()
    text = Tags(page).text
    assert code == 0
    assert "model.attention" in text
    assert "1 key differs" in text
    assert len(json.loads((tmp_path / "both" / "verdict.json").read_text())) == 2
    assert not [t for t, _ in Tags(page).tags if t in ("script", "img")]
    assert text.count('<script>alert("x")</script>') >= 8  # in the plots' legends too
    printed = capsys.readouterr().out
    for name in ("parameters", "training loss", "validation loss", "tokens/s"):
        assert re.search(rf"^{name} +(\S+) +\1 1.000×$", printed, re.M)
    for _, attrs in Tags(page).tags:
        if attrs.get("href", "").endswith("report.html"):
            assert (tmp_path / "both" / attrs["href"]).resolve().exists()


def columns_of(runs):
    return pages.columns(runs, [verdict(r) for r in runs], [run.folder / "report.html" for run in runs])


def test_every_run_of_a_comparison_is_compared_with_the_first(healthy, tmp_path):
    faster = each("step", tokens_per_s=lambda speed: 10 * speed)
    runs = [healthy, copy(healthy, tmp_path / "b", faster), copy(healthy, tmp_path / "c")]
    rows = {row["name"]: row["cells"] for row in pages.figure_rows(columns_of(runs))}
    assert [c["ratio"] for c in rows["tokens/s"]] == ["", "10.000×", "1.000×"]
    older = dataclasses.replace(healthy, config={k: v for k, v in healthy.config.items() if k != "data.separator"})
    unread = dataclasses.replace(healthy, config={})
    assert pages.loss_caution([*runs, older, unread]) == ""
    exercises = dataclasses.replace(healthy, config={**healthy.config, "data.retrieval": 0.3})
    assert "data.retrieval differs" in pages.loss_caution([healthy, exercises])
    same_name = copy(healthy, tmp_path / "elsewhere" / healthy.folder.name)
    assert len({c.label for c in columns_of([healthy, same_name])}) == 2


def test_losses_of_other_tokenizers_are_compared_per_byte(healthy, tmp_path):
    def words(lines):
        for line in lines:
            if line["kind"] == "validation":
                line |= {"loss": 3 * line["loss"], "bytes": 4 * line["tokens"]}

    other = copy(healthy, tmp_path / "words", words)
    other = dataclasses.replace(other, config={**other.config, "data.tokenizer": "words.json"})
    rows = {row["name"]: row["cells"] for row in pages.figure_rows(columns_of([healthy, other]))}
    assert rows["validation loss (other tokens)"][1]["ratio"] == ""
    assert rows["bits per byte"][1]["ratio"] == "0.750×"
    assert "data.tokenizer differs" in pages.loss_caution([healthy, other])


def test_a_run_is_not_compared_with_itself_under_any_path(healthy, tmp_path):
    folder, link = healthy.folder, tmp_path / "link"
    link.symlink_to(folder, target_is_directory=True)
    before = sorted(p.name for p in folder.iterdir())
    for runs in ([folder, folder], [folder, link]):
        with pytest.raises(UsageError, match=r"is given twice: give each run once$"):
            report(runs, out=tmp_path / "out")
    assert sorted(p.name for p in folder.iterdir()) == before
    assert not (tmp_path / "out").exists()
