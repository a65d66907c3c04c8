"""docs/results/production.md: what it says of each gate is what the report beside it says."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGE = (RESULTS / "production.md").read_text(encoding="utf-8")
VERDICT = json.loads((RESULTS / "production" / "verdict.json").read_text(encoding="utf-8"))
GATES = {gate["name"]: gate for gate in [*VERDICT["gates"], *VERDICT["beyond"]]}
EVIDENCE = {name: gate["evidence"] for name, gate in GATES.items()}
TOLD = {line.split(" | ")[0].strip("| "): line for line in PAGE.splitlines() if line.startswith("| ")}


def test_every_gate_is_told_with_its_verdict() -> None:
    assert len(VERDICT["gates"]) == 10
    assert {name: line.split(" | ")[1] for name, line in TOLD.items() if name != "gate"} == {
        name: gate["verdict"] for name, gate in GATES.items()
    }


def test_the_evidence_is_the_reports() -> None:
    first, last = (float(loss) for loss in EVIDENCE["stability"]["loss"].split(" → "))
    assert f"loss {first:.2f} → {last:.2f}, no spike" in TOLD["stability"]
    assert EVIDENCE["stability"]["processes"] == "interrupted, completed"
    assert f"peak {EVIDENCE['memory']['peak'].partition(' (')[0]}; 0.93 GiB" in TOLD["memory"]
    assert all(f"{float(gib):.2f}" == "0.93" for gib in re.findall(r"[\d.]+", EVIDENCE["memory"]["growth"]))
    assert GATES["throughput"]["sentence"] in TOLD["throughput"]
    passes = int(EVIDENCE["fallbacks"]["passes"].replace(",", ""))
    steps = 3052 * 12 * 3  # of 12 layers and 3 branches
    assert f"in the {passes:,} passes that were logged (of {steps:,}: the six steps before" in TOLD["routing"]
    assert steps - passes == 6 * 12 * 3
    assert EVIDENCE["fallbacks"]["fallbacks"] == "0"
    seconds, share = re.findall(r"[\d.]+", EVIDENCE["checkpoint and resume"]["standing still"])
    assert f"stood still for {float(seconds):.1f} s in all, {float(share):.1f}%" in TOLD["checkpoint and resume"]
    assert EVIDENCE["checkpoint and resume"]["saved"] == "3"
    waited = EVIDENCE["data"]["waiting for data"].split()[0]
    assert f"{waited} of the time waiting" in TOLD["data"]
    loss, tokens = re.findall(r"loss ([\d.]+) over ([\d,]+) tokens", EVIDENCE["data"]["validation"])[0]
    assert f"held-out loss on {tokens} tokens" in TOLD["data"]
    assert f"NSA ends at {loss} and" in PAGE
    assert "forward 2.6e-03, backward 3.4e-03, 100.000% of slots equal" in EVIDENCE["numerics"]["kernel parity"]


def test_what_is_said_of_the_layers_is_what_they_did() -> None:
    with (RESULTS / "quality" / "nsa-layers.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    end = [row for row in rows if row["step"] == rows[-1]["step"]]
    shares = [[float(row[f"gate_share_{b}"]) for b in ("compressed", "selected", "window")] for row in end]
    others = [share for layer in shares[1:] for share in layer]
    assert f"({min(others):.0%} to {max(others):.0%} of the gates)" in TOLD["selection health"]
    stay = [float(row["selected_overlap"]) for row in end]
    assert f"{min(stay):.0%} to {max(stay):.0%} of the chosen blocks stay" in TOLD["selection health"]
    assert f"It gives {shares[0][2]:.0%} of its gates to the window, and {shares[0][0]:.1%} to the" in PAGE
    collapsed = [float(row["gate_collapse"]) for row in end]
    assert f"at most {max(collapsed[1:]):.0%} of tokens and heads have one gate over 95% (layer 4;" in PAGE
    assert collapsed[4] == max(collapsed[1:])
    (least, at), (second, then) = sorted((min(share), layer) for layer, share in enumerate(shares) if layer)[:2]
    assert f"the smallest shares of a branch are {least:.0%} (layer {at}) and {second:.0%} (layer {then})" in PAGE


def test_warnings_of_the_run_are_told() -> None:
    report = (RESULTS / "production" / "report.md").read_text(encoding="utf-8")
    warned = re.findall(r"^- step (\d+), rank 0: (\w+): layer (\d+): .*?([\d.]+)% of", report, re.MULTILINE)
    assert {layer for *_, layer, _ in warned} == {"0"}
    assert [step for step, rule, *_ in warned if rule == "gate_collapse"] == ["540", "1520"]
    dead = [(int(step), float(share)) for step, rule, _, share in warned if rule == "dead_branch"]
    low, high = min(share for _, share in dead), max(share for _, share in dead)
    assert len(dead) == 5
    assert f"(five times from step {dead[0][0]:,} on, with {low} to {high}% where 1% is asked for)" in PAGE


def test_no_page_names_a_path_of_the_machine_that_made_it() -> None:
    for file in (RESULTS / "production").rglob("*.*"):
        assert not re.search(r"(?<![\w.])/(tmp|work|root|home)/", file.read_text(encoding="utf-8")), file
