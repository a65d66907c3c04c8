"""docs/results/quality.md: its tables say what the files beside it say."""

from __future__ import annotations

import csv
import json
import re
import runpy
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from tercet.config.load import differences, load

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results" / "quality.md").read_text(encoding="utf-8")
RECORDS = ROOT / "docs" / "results" / "quality"
PRODUCTION = ROOT / "docs" / "results" / "production"
VERDICT = {gate["name"]: gate for gate in json.loads((PRODUCTION / "verdict.json").read_text())["gates"]}
SCRIPT = ROOT / "scripts" / "eval_tables.py"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert runpy.run_path(str(SCRIPT))["main"](list(arguments)) == 0
    return capsys.readouterr().out.splitlines()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_needles_of_the_page_are_what_the_evaluations_printed(capsys: pytest.CaptureFixture[str]) -> None:
    files = (f"{name}={RECORDS / f'needle-{name.lower()}.txt'}" for name in ("NSA", "dense"))
    assert "\n".join(printed(capsys, *files)) in PAGE


def test_losses_by_context_of_the_page_are_what_the_evaluations_printed(capsys: pytest.CaptureFixture[str]) -> None:
    files = (f"{name}={RECORDS / f'perplexity-{name.lower()}.txt'}" for name in ("NSA", "dense"))
    head, _, *rows = printed(capsys, *files)
    first = cells(head).index("8–15")  # the page leaves out the first eight tokens
    for line in (head, *rows):
        label, *values = cells(line)
        assert f"| {' | '.join([label, *values[first - 1 :]])} |" in PAGE


def test_losses_by_context_before_are_what_the_evaluations_printed(capsys: pytest.CaptureFixture[str]) -> None:
    files = (f"NSA before={RECORDS / 'before' / 'perplexity.txt'}", f"dense={RECORDS / 'perplexity-dense.txt'}")
    head, _, _, before, _, against = printed(capsys, *files)
    first = cells(head).index("8–15")
    for line in (before, against):
        label, *values = cells(line)
        assert f"| {' | '.join([label, *values[first - 1 :]])} |" in PAGE


def test_validation_losses_of_the_page_are_the_runs(capsys: pytest.CaptureFixture[str]) -> None:
    files = (
        f"{label}={RECORDS / f'{name}-validation.csv'}" for label, name in (("**NSA**", "nsa"), ("dense", "dense"))
    )
    assert "\n".join(printed(capsys, *files)).replace("**NSA** against", "NSA against") in PAGE


def test_gates_of_the_page_are_what_the_layers_did(capsys: pytest.CaptureFixture[str]) -> None:
    files = (f"now={RECORDS / 'nsa-layers.csv'}", f"before={RECORDS / 'before' / 'layers.csv'}")
    assert "\n".join(printed(capsys, *files)) in PAGE


def losses(file: str) -> dict[int, float]:
    with (RECORDS / file).open() as stream:
        return {int(line["step"]): float(line["loss"]) for line in csv.DictReader(stream)}


def percent(ratio: float, digits: int = 1) -> str:
    return f"{ratio - 1:+.{digits}%}".replace("-", "−")


def test_the_result_is_what_the_files_say() -> None:
    last = {name: losses(f"{name}-validation.csv")[3052] for name in ("nsa", "dense")}
    before = losses("before/validation.csv")[3052]
    assert f"NSA ends at {last['nsa']:.4f} nats per byte, dense at {last['dense']:.4f}." in PAGE
    assert f"NSA is {1 - last['nsa'] / last['dense']:.1%} better; on twice as much" in PAGE
    assert f"ended at {before:.4f}, {before / last['dense'] - 1:.1%} *worse* than dense" in PAGE
    assert f"| held-out loss | {before:.4f} | {last['nsa']:.4f} |" in PAGE
    whole = {name: evaluated(f"perplexity-{name}.txt")["all"]["loss"] for name in ("nsa", "dense")}
    better = 1 - whole["nsa"] / whole["dense"]
    assert f"it is {better:.1%} better, too ({whole['nsa']:.4f} against {whole['dense']:.4f})" in PAGE
    assert "77.2M parameters on NVIDIA H200" in (PRODUCTION / "report.md").read_text(encoding="utf-8")


def evaluated(file: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDS / file).read_text().strip().splitlines()[-1])
    return record


def test_nsa_is_ahead_in_every_stretch_of_context() -> None:
    nsa, dense = (evaluated(f"perplexity-{name}.txt")["by_position"] for name in ("nsa", "dense"))
    assert all(mine["loss"] < its["loss"] for mine, its in zip(nsa, dense, strict=True))


def test_what_is_said_of_the_contexts_is_so() -> None:
    kinds = (("nsa", "perplexity-nsa.txt"), ("dense", "perplexity-dense.txt"), ("before", "before/perplexity.txt"))
    found = {name: {s["first"]: s["loss"] for s in evaluated(file)["by_position"]} for name, file in kinds}
    lead = {first: f"{1 - loss / found['dense'][first]:.1%}" for first, loss in found["nsa"].items()}
    assert lead[256] == lead[512]
    assert f"by {lead[256]} with 256 to 1,023 tokens, by {lead[4096]} with\n4,096 to 8,191" in PAGE
    assert f"from {lead[256]} at 256–1,023 tokens to {lead[4096]} at 4,096–8,191" in PAGE
    late = {name: percent(losses[4096] / losses[2048]) for name, losses in found.items()}
    assert (
        f"dense stands still ({late['dense']}) and NSA loses a little ({late['nsa']}; before {late['before']})" in PAGE
    )
    small = {
        name: [s["loss"] for s in evaluated(f"choice/{name}-perplexity.txt")["by_position"][-4:]]
        for name in ("l16+mean", "tie+l16+mean", "tie+l16+mean+s32")
    }
    tie = [percent(mine / its) for mine, its in zip(small["tie+l16+mean"], small["l16+mean"], strict=True)]
    assert f"({tie[0]}, {tie[1]}), better with 4,096 and more ({tie[3]})" in PAGE
    whole = [evaluated(f"choice/{name}-perplexity.txt")["by_position"] for name in ("tie+l16+mean", "l16+mean")]
    worse = [mine["loss"] / its["loss"] - 1 for mine, its in zip(*whole, strict=True) if 1 <= its["first"] < 2048]
    assert f"by {min(worse):.0%} to {max(worse):.0%} in every bin but the first".replace("% to", " to") in PAGE
    needles = [evaluated(f"choice/{name}-needle.txt")["found"] for name in ("tie+l16+mean", "l16+mean")]
    (mine, its), (far, its_far) = (
        [sum(f["right"] for f in found if f["length"] == length) for found in needles] for length in (1024, 2048)
    )
    assert f"{mine} instead of {its} of 80 are right at 1,024 tokens, {far} instead of {its_far} at 2,048" in PAGE
    blocks = [percent(mine / its) for mine, its in zip(small["tie+l16+mean+s32"], small["tie+l16+mean"], strict=True)]
    assert f"more with more context ({blocks[0]} to {blocks[3]})" in PAGE


THREE = {"model.nsa.compress_block", "model.compression", "model.compress_selected_keys"}


def test_the_runs_differ_in_what_the_page_says_and_in_nothing_else() -> None:
    nsa, before, dense = (load(file=RECORDS / f"{name}config.toml").config for name in ("nsa-", "before/", "dense-"))
    assert differences(nsa, before).keys() == THREE
    assert differences(before, dense).keys() == {"run.name", "model.attention"}


def test_the_commands_of_the_page_are_the_runs() -> None:
    flags = PAGE.split('FLAGS="', 1)[1].split('"', 1)[0]
    for name in ("nsa", "dense"):
        (command,) = re.findall(rf"^tercet train (.* --run.dir runs/quality-{name}) \$FLAGS$", PAGE, re.MULTILINE)
        words = f"{command} {flags}".split()
        given = dict(zip((w.removeprefix("--") for w in words[::2]), words[1::2], strict=True))
        assert given.pop("resume") == "auto"
        ran = load(file=RECORDS / f"{name}-config.toml").config
        assert differences(load(preset=given.pop("preset"), flags=given).config, ran).keys() - THREE == {"run.dir"}
        if name == "nsa":  # the preset has them by now; dense attention has no use for them
            assert not THREE & differences(load(preset="m7c").config, ran).keys()


def test_what_is_said_of_the_needles_is_so() -> None:
    found = {
        name: {(f["length"], f["depth"]): f for f in evaluated(file)["found"]}
        for name, file in (("NSA", "needle-nsa.txt"), ("dense", "needle-dense.txt"), ("before", "before/needle.txt"))
    }
    lengths = sorted({length for length, _ in found["NSA"]})
    right = {
        name: [sum(f["right"] for (at, _), f in cells.items() if at == length) for length in lengths]
        for name, cells in found.items()
    }

    def listed(name: str) -> str:
        *first, last = right[name]
        return f"{', '.join(map(str, first))} and {last}"

    assert f"({listed('dense')} of 176; NSA {listed('NSA')})" in PAGE
    assert f"which had {listed('before')} of 176 right" in PAGE
    behind = {at for at, f in found["NSA"].items() if f["nats"] < found["dense"][at]["nats"]}
    deepest = {1024: -1.0, 2048: -1.0, 4096: 0.25, 8192: 0.65}
    assert behind == {at for at in found["NSA"] if at[1] < deepest[at[0]]}
    assert all(found[name][at]["nats"] >= 3 for name in ("NSA", "dense") for at in behind)
    for length in lengths[:2]:
        cells = [median(f["nats"] for (at, _), f in found[name].items() if at == length) for name in ("NSA", "dense")]
        assert f"{cells[0]:.2f} against {cells[1]:.2f}" in PAGE


def test_how_sure_the_comparison_is() -> None:
    with (RECORDS / "every-step.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    steps = {name: np.array([float(row[name]) for row in rows]) for name in ("nsa", "nsa_before", "dense")}
    assert [int(row["step"]) for row in rows] == list(range(1, 3053))
    dense, its = losses("dense-validation.csv"), evaluated("perplexity-dense.txt")["all"]
    columns: list[list[str]] = [[], [], [], [], []]
    for name, files in (
        ("nsa", ("nsa-validation.csv", "perplexity-nsa.txt")),
        ("nsa_before", ("before/validation.csv", "before/perplexity.txt")),
    ):
        mine, whole = losses(files[0]), evaluated(files[1])["all"]
        columns[0].append(percent(mine[3052] / dense[3052]))
        half = [record["nats"] - 1048520 * last for record, last in ((whole, mine[3052]), (its, dense[3052]))]
        columns[1].append(percent(half[0] / half[1]))
        columns[2].append(percent(whole["loss"] / its["loss"]))
        late = sorted(mine[step] / dense[step] for step in mine if step >= 1500)
        assert len(late) == 8
        low = percent(late[0]).removesuffix("%")
        columns[3].append(f"{low} to {percent(late[-1])}, mean {percent(float(np.mean(late)))}")
        stretches = [steps[kind][-500:].reshape(20, 25).mean(1) for kind in (name, "dense")]
        ratio = stretches[0] / stretches[1]
        columns[4].append(f"{percent(ratio.mean(), 2)} ± {ratio.std(ddof=1) / 20**0.5:.2%}")
    columns[4][0] += " (standard error, over 20 stretches of 25 steps)"
    for found in columns:
        assert f" | {' | '.join(found)} |\n" in PAGE


def test_the_runs_read_the_same_text_at_the_same_step() -> None:
    """Which text is easy moves both losses alike; read one step apart they have nothing to do with each other."""
    with (RECORDS / "every-step.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    moved = []
    for name in ("nsa", "dense"):
        values = np.log([float(row[name]) for row in rows])
        moved.append((values - np.convolve(values, np.ones(51) / 51, "same"))[1000:-30])
    together = np.corrcoef(moved[0], moved[1])[0, 1]
    apart = np.corrcoef(moved[0][1:], moved[1][:-1])[0, 1]
    told = f"(correlation {together:.2f} from step 1,000 on; shifted by one step {apart:.2f})"
    assert told.replace("-", "−") in PAGE


CHOICE = RECORDS / "choice"


def test_losses_of_the_small_models_are_the_runs() -> None:
    names = {file.name.removesuffix("-validation.csv") for file in CHOICE.glob("*-validation.csv")}
    assert len(names) == 11
    for name in names:
        *before, end = losses(f"choice/{name}-validation.csv").values()
        found = [*(f"{loss:.3f}" for loss in before), f"{end:.4f}"]
        assert f"| {' | '.join([name, *found])} |" in PAGE.replace("**", "")


@pytest.mark.parametrize(
    ("variant", "against", "told"),
    [
        ("tie", "base", "| tie: {} |"),
        ("l16", "base", "l = 16 instead of 32: {} |"),
        ("tie+l16", "l16", "| tie {}, l = 16"),
        ("tie+l16", "tie", ", l = 16 {}; both"),
        ("tie+l16", "base", "; both {} |\n| l16+mean"),
        ("l16+mean", "l16", "φ = mean: {}; both"),
        ("l16+mean", "base", "; both {} |\n| **tie+l16+mean"),
        ("tie+l16+mean", "tie+l16", "| φ = mean {}, tie"),
        ("tie+l16+mean", "l16+mean", ", tie {}; all three"),
        ("tie+l16+mean", "base", "; all three {}:"),
        ("tie+l16+mean+s32", "tie+l16+mean", "instead of 16 of 64: {}; all four"),
        ("tie+l16+mean+s32", "base", "; all four {} |"),
        ("l16+s32", "l16", "and its own keys: {}, worse |"),
        ("tie+l16+free", "tie+l16", "one local block: {}, worse |"),
        ("shared+l16", "l16", "one K/V set instead of three: {}, worse |"),
    ],
)
def test_what_a_change_was_worth_in_small_models(variant: str, against: str, told: str) -> None:
    end = [losses(f"choice/{name}-validation.csv")[2000] for name in (variant, against)]
    assert told.format(percent(end[0] / end[1])) in PAGE


def test_contexts_and_needles_of_the_small_models_are_what_the_evaluations_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("tie", "l16", "tie+l16", "l16+mean", "tie+l16+mean", "l16+s32", "tie+l16+mean+s32", "base")
    head, _, *rows = printed(capsys, *(f"{name}={CHOICE / f'{name}-perplexity.txt'}" for name in names))
    first = cells(head).index("512–1,023")
    for line in (head, *rows):
        label, *values = cells(line)
        assert f"| {' | '.join([label, *values[first - 1 :]])} |" in PAGE
    asked = ("base", "l16", "tie+l16", "l16+mean", "tie+l16+mean", "tie+l16+mean+s32")
    needles = printed(capsys, *(f"{name}={CHOICE / f'{name}-needle.txt'}" for name in asked))
    assert "\n".join(line for line in needles if "1,024 t" not in line and "8,192 t" not in line) in PAGE
    right = [
        sum(f["right"] for f in evaluated(f"choice/{name}-needle.txt")["found"][:5]) for name in ("l16+mean", "l16")
    ]
    assert f"({right[0]} instead of {right[1]} of 80 at 1,024 tokens)" in PAGE
    for name in asked:
        assert not any(f["right"] for f in evaluated(f"choice/{name}-needle.txt")["found"] if f["length"] == 8192)


def test_what_blocks_of_32_cost_is_what_was_measured() -> None:
    steps = json.loads((CHOICE / "s32-steps.json").read_text())["results"]
    short, long = (step["nsa"]["tokens_per_s"] for step in steps)
    assert f"{short:,.0f} tokens/s\nat 32 × 2,048 and {long:,.0f} at 8 × 8,192" in PAGE
    ((ratio, plain),) = re.findall(r"That is ([\d.]+) of dense on plain batches \(([\d,]+), \[performance\]", PAGE)
    assert ratio == f"{long / int(plain.replace(',', '')):.2f}"
    ran = int(VERDICT["throughput"]["sentence"].split()[0].replace(",", ""))
    assert f"the {ran:,} at which the run of this page went" in PAGE
    assert 0.74 < long / ran < 0.76  # "a quarter less"
    twin = int(VERDICT["throughput"]["evidence"]["dense twin"].split()[0].replace(",", ""))
    assert f"({long / twin:.2f} of dense on packed documents" in PAGE


def test_rows_of_the_toy_are_the_recorded_ones() -> None:
    labels = {
        "dense": "dense", "every block is read: nothing to choose": "base+all",
        "**NSA as the paper has it** (base)": "base",
        "tie: compressed keys are summaries of the selected keys": "tie", "l halved": "base+half",
        "tie, l halved": "tie+half", "φ = mean": "base+mean", "φ learns ten times slower than the rest": "base+slow",
        "tie, φ = mean": "tie+mean", "tie, φ = mean for keys only": "tie+keymean",
        "tie, φ learns ten times slower": "tie+slow",
        "tie, φ = mean, l halved": "tie+half+mean", "ten blocks of 8 instead of five of 16": "base+small",
        "tie, φ = mean, ten blocks of 8": "tie+mean+small",
        "tie, φ = mean, l halved, ten blocks of 8": "tie+half+mean+small",
        "no forced first block, one local block": "base+free", "one K/V set": "shared",
    }  # fmt: skip
    with (CHOICE / "toy.csv").open() as stream:
        rows = [row for row in csv.DictReader(stream) if row["layers"] == "1"]
    assert {row["variant"] for row in rows} == set(labels.values())
    with (CHOICE / "toy-option.csv").open() as stream:
        again = [row for row in csv.DictReader(stream) if row["variant"] != "base"]
    for label, variant in labels.items():
        seeds = [row for row in rows if row["variant"] == variant]
        columns = ("copied", "hit_far", "chance_far", "gate_compressed")
        found = [" / ".join(row[column] for row in seeds if row[column]) for column in columns]
        found.insert(1, " / ".join(row["copied"] for row in again if row["variant"] == variant))
        assert f"| {' | '.join([label, *found])} |" in PAGE


def test_what_is_no_table_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stretch = {"first": 0, "last": 0, "tokens": 5, "nats": 5.0, "loss": 1.0}
    for name, tokens in (("a", 5), ("b", 6)):
        one = stretch | {"tokens": tokens}
        (tmp_path / name).write_text(json.dumps({"eval": "perplexity", "by_position": [one], "all": one}))
    (tmp_path / "text").write_text("no evaluation\n")
    for other, words in (("b", "a was measured on other tokens than b"), ("text", "does not end with the JSON line")):
        assert runpy.run_path(str(SCRIPT))["main"]([f"a={tmp_path / 'a'}", f"b={tmp_path / other}"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert words in said
        assert said.count("\n") == 1


def test_the_noise_of_the_page_is_what_the_runs_of_tiny_left() -> None:
    with (RECORDS / "tiny-seeds.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    ends = {
        name: {int(row["seed"]): float(row["validation_loss"]) for row in rows if row["kind"] == name}
        for name in ("nsa", "dense")
    }
    for label, name in (("NSA", "nsa"), ("dense", "dense")):
        found = [*(f"{ends[name][seed]:.3f}" for seed in range(1, 7)), f"{np.mean(list(ends[name].values())):.3f}"]
        assert f"| {' | '.join([label, *found])} | |" in PAGE
    ratios = np.array([ends["nsa"][seed] / ends["dense"][seed] for seed in range(1, 7)])
    each = [percent(ratios[0], 2), *(percent(ratio) for ratio in ratios[1:]), f"**{percent(ratios.mean())}**"]
    assert f"| NSA against dense | {' | '.join(each)} | {ratios.std(ddof=1):.1%} |" in PAGE


def test_the_noise_is_measured_with_the_block_of_its_table_whatever_the_preset_has_now() -> None:
    told = PAGE[PAGE.index("for preset in tiny tiny-dense") :].split("\ndone", 1)[0]
    script = (ROOT / "scripts" / "quality.sh").read_text(encoding="utf-8").split("\nseeds)", 1)[1]
    for command in (told, script):
        assert "--data.shuffle_sequences 4096 --train.steps 800" in command


def test_tables_of_the_windows_are_what_those_runs_left(capsys: pytest.CaptureFixture[str]) -> None:
    page = (RECORDS / "windows.md").read_text(encoding="utf-8").replace("**", "")
    kinds = {
        "NSA, window 128": "nsa-{}", "NSA, window 512, one K/V set": "shared/{}", "NSA, window 512": "window512/{}",
        "dense": "dense-{}",
    }  # fmt: skip
    files = {name: RECORDS / "short" / file.format("validation.csv") for name, file in kinds.items()}
    _, _, *rows = printed(capsys, *(f"{name}={file}" for name, file in files.items()))
    for line in rows[:4]:
        assert f"| {' | '.join(cells(line)[1:])} |" in page
    assert rows[4].replace("window 128 against", "window 128, against") in page
    evaluations = {name: file.replace("{}", "perplexity.txt") for name, file in kinds.items()}
    evaluations |= {"NSA, window 128": "perplexity-nsa.txt", "dense": "perplexity-dense.txt"}
    head, _, _, *rows = printed(capsys, *(f"{name}={RECORDS / 'short' / file}" for name, file in evaluations.items()))
    first = cells(head).index("64–127")
    for line in (head, *rows):
        label, *values = cells(line)
        assert f"| {' | '.join([label, *values[first - 1 :]])} |" in page
    needles = {name: file.replace("perplexity", "needle") for name, file in evaluations.items()}
    for line in printed(capsys, *(f"{name}={RECORDS / 'short' / file}" for name, file in needles.items()))[2:]:
        if "1,024 tokens" in line or line.startswith(("| NSA, window 128, 2,048", "| dense, 2,048")):
            assert line in page
