"""Generate the tables of the results pages from the committed result files.

    python scripts/results_tables.py             # rewrite every table between its markers
    python scripts/results_tables.py --check     # exit code 1 if a page is out of date
    python scripts/results_tables.py NSA=runs/perplexity-nsa.txt dense=runs/perplexity-dense.txt
                                                 # print one table for your own runs; the last one is the baseline

A page marks a table with `<!-- table:NAME -->` and `<!-- /table -->`; TABLES below maps each name to a function. The
last form accepts what `tercet eval perplexity` and `tercet eval needle` print, and a run's `val.csv` and `layers.csv`.
"""

from __future__ import annotations

import csv
import json
import re
import runpy
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
SETTINGS = RESULTS / "block-settings"
MARKED = re.compile(r"(<!-- table:([\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
BRANCHES = ("compressed", "selected", "window")

Records = dict[str, dict[str, Any]]


# Reading result files


def read_eval(path: Path) -> dict[str, Any]:
    """The JSON line that ends the output of every `tercet eval`."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
    except (OSError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} does not end with the JSON line of `tercet eval`: {error}") from error
    return record


def read_csv(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8") as stream:
            return list(csv.DictReader(stream))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def losses(path: Path) -> dict[int, float]:
    """Validation loss by step."""
    return {int(row["step"]): float(row["loss"]) for row in read_csv(path)}


# Formatting


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, *rows]
    return "\n".join([_line(lines[0]), "|" + "---|" * len(head), *(_line(cells) for cells in lines[1:])])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("  ", " ")


def change(ratio: float, digits: int = 1) -> str:
    return f"{ratio - 1:+.{digits}%}".replace("-", "−")


def span(first: int, last: int) -> str:
    return f"{first:,}–{last:,}" if first < last else f"{first:,}"


def share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.01 else f"{value:.1%}"


# Tables of one kind of result file; the last record is the baseline


def by_context(records: Records, first: int = 0) -> str:
    """Loss by context length: one row per bin, one column per model, then each model against the last one."""
    bins = {name: [*record["by_position"], record["all"]] for name, record in records.items()}
    measured = {name: [(b["first"], b["last"], b["tokens"]) for b in found] for name, found in bins.items()}
    *others, base = records
    for name in others:
        if measured[name] != measured[base]:
            raise ValueError(f"{name} was measured on other tokens than {base}: evaluate both on the same tokens")
    rows = []
    for at, (low, high, tokens) in enumerate(measured[base]):
        whole = at == len(measured[base]) - 1
        if low < first and not whole:
            continue
        found = {name: column[at]["loss"] for name, column in bins.items()}
        rows.append(
            [
                "all" if whole else span(low, high),
                f"{tokens:,}",
                *(f"{loss:.4f}" for loss in found.values()),
                *(change(found[name] / found[base]) for name in others),
            ]
        )
    return table(["context", "tokens", *records, *(f"{name} vs {base}" for name in others)], rows)


def by_step(records: Records) -> str:
    """Validation loss: one row per step at which all runs were validated."""
    found = {name: {int(r["step"]): float(r["loss"]) for r in record["rows"]} for name, record in records.items()}
    *others, base = found
    rows = [
        [
            f"{step:,}",
            *(f"{by[step]:.3f}" for by in found.values()),
            *(change(found[name][step] / found[base][step]) for name in others),
        ]
        for step in sorted(set.intersection(*map(set, found.values())))
    ]
    return table(["step", *found, *(f"{name} vs {base}" for name in others)], rows)


def needles(records: Records, lengths: Iterable[int] | None = None) -> str:
    """Loss of the answer (correct answers): one row per distance from the end, one column per length and model."""
    found = {
        (length, name): [f for f in record["found"] if f["length"] == length]
        for length in sorted(lengths or {f["length"] for record in records.values() for f in record["found"]})
        for name, record in records.items()
    }
    depths = sorted({f["depth"] for column in found.values() for f in column}, reverse=True)
    rows = []
    for depth in depths:
        at = [[f for f in column if f["depth"] == depth] for column in found.values()]
        rows.append([f"{1 - depth:.0%}", *(f"{f[0]['nats']:.2f} ({f[0]['right']})" if f else "" for f in at)])
    totals = [f"{sum(f['right'] for f in column)} of {sum(f['asked'] for f in column)}" for column in found.values()]
    rows.append(["**correct**", *totals])
    return table(["distance", *(f"{name}, {length / 1024:g}k" for length, name in found)], rows)


def gate_shares(records: Records) -> str:
    """Share of its gates that each layer gives each branch at the last reading."""
    columns: dict[str, list[str]] = {}
    for name, record in records.items():
        last = max(int(r["step"]) for r in record["rows"])
        end = [r for r in record["rows"] if int(r["step"]) == last]
        for branch in BRANCHES:
            columns[f"{name}, {branch}"] = [share(float(r[f"gate_share_{branch}"])) for r in end]
    layers = range(max(map(len, columns.values())))
    return table(["layer", *columns], [[str(at), *(column[at] for column in columns.values())] for at in layers])


# Tables of docs/nsa.md


def keys_per_query() -> str:
    """Keys that the last query of a sequence reads, by SPEC's formulas, with the operator's defaults."""
    compress_block, stride, block, count, window = 32, 16, 64, 16, 512
    rows = []
    for tokens in (2048, 8192, 65_536, 1_048_576):
        compressed = (tokens - compress_block) // stride + 1
        selected = min(count * block, tokens)
        total = compressed + selected + min(window, tokens)
        numbers = (tokens, compressed, selected, min(window, tokens), total)
        rows.append([*(f"{number:,}" for number in numbers), f"{tokens / total:.1f}×"])
    return table(["sequence", "compressed", "selected", "window", "keys read", "fewer than dense"], rows)


# Tables of docs/results/block-settings.md


def _settings_evals(kind: str, *names: str) -> Records:
    labels = {"nsa": "NSA", "paper": "paper's φ", "dense": "dense"}
    return {labels[name]: read_eval(SETTINGS / f"{kind}-{name}.txt") for name in names}


def settings_context() -> str:
    return by_context(_settings_evals("perplexity", "nsa", "paper", "dense"), first=8)


def settings_needles() -> str:
    """Needles found by length."""
    records = _settings_evals("needle", "nsa", "paper", "dense")
    lengths = sorted({f["length"] for f in records["NSA"]["found"]})
    found = {
        name: [sum(f["right"] for f in record["found"] if f["length"] == length) for length in lengths]
        for name, record in records.items()
    }
    return table(["", *(f"{n:,}" for n in lengths)], [[name, *map(str, right)] for name, right in found.items()])


def _tiny(kind: str) -> dict[int, float]:
    rows = read_csv(RESULTS / "evidence" / "tiny-seeds.csv")
    return {int(row["seed"]): float(row["validation_loss"]) for row in rows if row["kind"] == kind}


def tiny_seeds() -> str:
    nsa, dense = _tiny("nsa"), _tiny("dense")
    ratios = [nsa[seed] / dense[seed] for seed in sorted(nsa)]
    rows = [
        [str(seed), f"{nsa[seed]:.3f}", f"{dense[seed]:.3f}", change(ratio)]
        for seed, ratio in zip(sorted(nsa), ratios, strict=True)
    ]
    mean = [f"{statistics.mean(found.values()):.3f}" for found in (nsa, dense)]
    rows.append(["**mean**", *mean, f"**{change(statistics.mean(ratios))}**"])
    spread = statistics.stdev(ratios)
    rows.append(["standard deviation (error)", "", "", f"{spread:.1%} ({spread / len(ratios) ** 0.5:.2%})"])
    return table(["seed", "NSA", "dense", "NSA vs dense"], rows)


def tiny_choice() -> str:
    rows = read_csv(SETTINGS / "tiny-choice.csv")
    labels = {"as it is": "as in the preset"}
    names = list(dict.fromkeys(row["variant"] for row in rows))
    seeds = sorted({row["seed"] for row in rows})
    found = {(row["variant"], row["seed"]): row["validation_loss"] for row in rows}
    cells = [[labels.get(name, f"`{name}`"), *(found[name, seed] for seed in seeds)] for name in names]
    return table(["`tiny`, held-out loss", *(f"seed {seed}" for seed in seeds)], cells)


TOY_VARIANTS = {
    "dense": "dense",
    "base+all": "NSA, every block read",
    "base": "**NSA, paper's settings** (base)",
    "base+half": "l halved",
    "base+small": "ten blocks of 8",
    "base+free": "no forced first block, one local block",
    "shared": "one K/V set",
    "base+mean": "φ = mean",
    "base+slow": "φ at a tenth of the learning rate",
    "tie": "tied keys",
    "tie+half": "tied keys, l halved",
    "tie+mean": "tied keys, φ = mean",
    "tie+keymean": "tied keys, φ = mean for keys only",
    "tie+slow": "tied keys, slow φ",
    "tie+half+mean": "tied keys, φ = mean, l halved",
    "tie+mean+small": "tied keys, φ = mean, ten blocks of 8",
    "tie+half+mean+small": "tied keys, φ = mean, l halved, blocks of 8",
}


def _toy_rows() -> dict[str, list[dict[str, str]]]:
    """One-layer rows by variant; tied variants come from the runs with `compress_selected_keys`."""
    option, plain = (read_csv(SETTINGS / "choice" / name) for name in ("toy-option.csv", "toy.csv"))
    rows = [row for row in plain if "tie" not in row["variant"]] + [row for row in option if "tie" in row["variant"]]
    found: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        if row["layers"] == "1":
            found.setdefault(row["variant"], []).append(row)
    return found


def toy() -> str:
    found = _toy_rows()
    if found.keys() != TOY_VARIANTS.keys():
        raise ValueError(f"toy variants without a label or a row: {found.keys() ^ TOY_VARIANTS.keys()}")
    columns = ("copied", "hit_far", "chance_far", "gate_compressed")
    rows = [
        [label, *(" / ".join(row[column] for row in found[variant] if row[column]) for column in columns)]
        for variant, label in TOY_VARIANTS.items()
    ]
    head = ["layer", "copied tokens, nats", "source in a chosen block", "by chance", "compressed gate"]
    return table(head, rows)


def toy_keys() -> str:
    """How often base would choose a block with the source if it chose by means of its own selected keys."""
    rows = [row for row in read_csv(SETTINGS / "choice" / "toy-option.csv") if row["variant"] == "base"]
    columns = {
        "its own choice": "hit_far",
        "mean of 8 keys": "mean_8_far",
        "mean of 4 keys": "mean_4_far",
        "mean of 2 keys": "mean_2_far",
        "the keys themselves": "mean_1_far",
    }
    cells = [["source in a chosen block", *(" / ".join(row[c] for row in rows) for c in columns.values())]]
    return table(["base chooses blocks by", *columns], cells)


SMALL_MODELS = {  # variant: what it changes, and the variants that it is compared with
    "base": ("paper's settings", {}),
    "tie": ("tied keys", {"base": "base"}),
    "l16": ("l = 16", {"base": "base"}),
    "tie+l16": ("tied keys, l = 16", {"base": "base", "l16": "tie", "tie": "l16"}),
    "l16+mean": ("l = 16, φ = mean", {"base": "base", "l16": "mean"}),
    "tie+l16+mean": ("**all three: `m7c`**", {"base": "base", "tie+l16": "mean", "l16+mean": "tie"}),
    "tie+l16+mean+s32": ("and 32 blocks of 32", {"base": "base", "tie+l16+mean": "s32"}),
    "l16+s32": ("l = 16, 32 blocks of 32", {"base": "base", "l16": "s32"}),
    "tie+l16+free": ("tie+l16, no forced first block", {"base": "base", "tie+l16": "free"}),
    "shared+l16": ("l = 16, one K/V set", {"base": "base", "l16": "shared"}),
    "dense": ("dense", {}),
}
CHOICE_CONTEXT = ("tie", "l16", "tie+l16", "l16+mean", "tie+l16+mean", "tie+l16+mean+s32", "l16+s32", "base")
CHOICE_NEEDLES = ("base", "l16", "tie+l16", "l16+mean", "tie+l16+mean", "tie+l16+mean+s32")


def small_models() -> str:
    found = {name: losses(SETTINGS / "choice" / f"{name}-validation.csv") for name in SMALL_MODELS}
    steps = sorted(found["base"])
    rows = []
    for name, (label, against) in SMALL_MODELS.items():
        end = found[name][steps[-1]]
        effects = {word: change(end / found[other][steps[-1]]) for other, word in against.items()}
        parts = ", ".join(f"{word} {effect}" for word, effect in effects.items() if word != "base")
        values = [f"{found[name][step]:.3f}" for step in steps[:-1]] + [f"{end:.4f}"]
        rows.append([name, label, *values, effects.get("base", ""), parts])
    head = ["variant", "settings", *(f"{step:,}" for step in steps), "vs base", "effect of one change"]
    return table(head, rows)


def small_context() -> str:
    """Loss against base by context, and base's own loss."""
    found = {name: read_eval(SETTINGS / "choice" / f"{name}-perplexity.txt") for name in CHOICE_CONTEXT}
    bins = {
        name: [b for b in record["by_position"] if b["first"] >= 128] + [record["all"]]
        for name, record in found.items()
    }
    rows = []
    for at, base in enumerate(bins["base"]):
        whole = at == len(bins["base"]) - 1
        against = [change(bins[name][at]["loss"] / base["loss"]) for name in CHOICE_CONTEXT if name != "base"]
        rows.append(["all" if whole else span(base["first"], base["last"]), f"{base['loss']:.4f}", *against])
    return table(["context", "base, nats", *(name for name in CHOICE_CONTEXT if name != "base")], rows)


def small_needles() -> str:
    """Needles found by length; in brackets the loss of the answer 10% and 40% of the length back."""
    rows = []
    for name in CHOICE_NEEDLES:
        found = read_eval(SETTINGS / "choice" / f"{name}-needle.txt")["found"]
        cells = []
        for length in (1024, 2048, 4096, 8192):
            here = [f for f in found if f["length"] == length]
            near, far = (next(f["nats"] for f in here if f["depth"] == depth) for depth in (0.9, 0.6))
            right = f"{sum(f['right'] for f in here)} of {sum(f['asked'] for f in here)}"
            cells.append(f"{right} ({near:.2f}, {far:.2f})")
        rows.append([name, *cells])
    return table(["variant", "1,024", "2,048", "4,096", "8,192"], rows)


WINDOWS = {"w128": "w128", "w512 shared": "w512-shared", "w512": "w512", "dense": "dense"}


def _window_evals(kind: str) -> Records:
    return {label: read_eval(SETTINGS / "windows" / f"{name}-{kind}.txt") for label, name in WINDOWS.items()}


def windows_validation() -> str:
    folder = SETTINGS / "windows"
    return by_step({label: {"rows": read_csv(folder / f"{name}-validation.csv")} for label, name in WINDOWS.items()})


def windows_context() -> str:
    return by_context(_window_evals("perplexity"), first=64)


def windows_needles() -> str:
    return needles(_window_evals("needle"), lengths=(1024,))


# The table of docs/nsa.md


def recall() -> str:
    """Correct answers by distance, with all branches and with the window alone."""
    runs = [run["by_distance"] for run in read_eval(RESULTS / "recall" / "small-64.txt")["runs"]]
    rows = [
        [span(bins[0]["first"], bins[0]["last"]), *(f"{one['accuracy']:.1%} of {one['asked']}" for one in bins)]
        for bins in zip(*runs, strict=True)
    ]
    return table(["tokens back", "NSA", "window only"], rows)


# Tables of docs/gpus.md. The plans are those of `tercet plan`.

PLANNED_RUNS = (  # preset, seq_len
    ("m7c", 2048),
    ("m7c", 8192),
    ("m7c-gpt2", 4096),
    ("m7c-64k", 65_536),
    ("m7c-64k", 262_144),
    ("m7c-64k", 1_048_576),
    ("350m", 8192),
    ("350m-64k", 65_536),
    ("1b", 8192),
    ("1b-64k", 65_536),
)
STEP_TOKENS = 65_536  # tokens per pass; a longer sequence is a pass by itself


def _planned_gib(preset: str, length: int, batch: int, checkpointing: str, gpu: str) -> tuple[float, bool]:
    """GiB of a step, and whether it fits."""
    from tercet.config.load import load
    from tercet.plan import find_device, make_plan

    flags = {
        "data.seq_len": length,
        "train.micro_batch": batch,
        "train.tokens_per_step": max(STEP_TOKENS, length),
        "train.activation_checkpointing": checkpointing,
    }
    plan = make_plan(load(preset, flags=flags).config, find_device("auto", gpu))
    return plan.memory.total / 2**30, bool(plan.fits)


def gpu_plans(gpu: str) -> str:
    """The largest micro-batch that fits, and its memory, by preset, length and activation checkpointing."""
    modes = ("none", "selective", "full")

    def cell(preset: str, length: int, mode: str) -> str:
        batch = max(1, STEP_TOKENS // length)
        while batch:
            gib, fit = _planned_gib(preset, length, batch, mode, gpu)
            if fit:
                return f"{batch} ({gib:.1f} GiB)"
            batch //= 2
        return "does not fit"

    rows = [
        [f"`{preset}`", f"{length:,}", *(cell(preset, length, mode) for mode in modes)]
        for preset, length in PLANNED_RUNS
    ]
    return table(["preset", "`data.seq_len`", *(f"`{mode}`" for mode in modes)], rows)


def gpu_measured() -> str:
    """Measured training steps on one H200 beside their plan."""
    files = [RESULTS / "performance" / f"{part}.json" for part in ("train", "large")]
    records = [json.loads(file.read_text(encoding="utf-8"))["results"] for file in files if file.exists()]
    cells = [found for record in records for found in record if found.get("kind") == "nsa" and found["outcome"] == "ok"]
    steps = [found for found in cells if found.get("mode", "nsa") == "nsa"]
    rows, above = [], []
    for found in sorted(steps, key=lambda found: (found["parameters"], found["length"])):
        length, batch = found["length"], found["batch"]
        planned, _ = _planned_gib(found["preset"], length, batch, found["checkpointing"], "H200")
        above.append(planned / found["peak_gib"] - 1)
        memory = [f"{gib:.1f} GiB" for gib in (found["peak_gib"], found["reserved_gib"], planned)]
        rows.append([f"`{found['preset']}`", f"{length:,}", str(batch), *memory, f"{found['tokens_per_s']:,.0f}"])
    head = ["preset", "`data.seq_len`", "`micro_batch`", "peak, measured", "reserved, measured", "peak, estimated"]
    span = f"Estimate against measured peak: {min(above):+.0%} to {max(above):+.0%}."
    return f"{table([*head, 'tokens/s, measured'], rows)}\n\n{span}"


TABLES: dict[str, Callable[[], str]] = {
    "keys-per-query": keys_per_query,
    "settings-context": settings_context,
    "settings-needles": settings_needles,
    "tiny-seeds": tiny_seeds,
    "tiny-choice": tiny_choice,
    "toy": toy,
    "toy-keys": toy_keys,
    "small-models": small_models,
    "small-context": small_context,
    "small-needles": small_needles,
    "windows-validation": windows_validation,
    "windows-context": windows_context,
    "windows-needles": windows_needles,
    "recall": recall,
    "gpu-measured": gpu_measured,
    "gpu-24": lambda: gpu_plans("L4"),
    "gpu-48": lambda: gpu_plans("L40S"),
    "gpu-80": lambda: gpu_plans("H100"),
    "gpu-141": lambda: gpu_plans("H200"),
    **runpy.run_path(str(ROOT / "scripts" / "retrieval_tables.py"))["TABLES"],
    **runpy.run_path(str(ROOT / "scripts" / "conversion_tables.py"))["TABLES"],
    **runpy.run_path(str(ROOT / "scripts" / "evidence_tables.py"))["TABLES"],
}


def pages() -> list[Path]:
    """Every page with at least one marked table, but for those of scripts/performance_tables.py."""
    found = (page for page in sorted(DOCS.rglob("*.md")) if page != DOCS / "performance.md")
    return [page for page in found if MARKED.search(page.read_text(encoding="utf-8"))]


def fill(text: str) -> str:
    """The page with every marked table generated anew."""

    def generated(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"table:{match[2]} is unknown: pick one of {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[match[2]]()}\n{match[3]}"

    return MARKED.sub(generated, text)


def print_table(arguments: list[str]) -> None:
    """One table from files given as NAME=FILE."""
    records: Records = {}
    for name, _, file in (given.partition("=") for given in arguments):
        path = Path(file)
        records[name] = _run_file(path) if path.suffix == ".csv" else read_eval(path)
    makers = {"perplexity": by_context, "needle": needles, "validations": by_step, "gates": gate_shares}
    kinds = {record["eval"] for record in records.values()}
    if len(kinds) != 1 or not kinds <= makers.keys():
        raise ValueError(f"{', '.join(sorted(kinds))}: give files of one kind: {', '.join(makers)}")
    print(makers[kinds.pop()](records))


def _run_file(path: Path) -> dict[str, Any]:
    rows = read_csv(path)
    columns = rows[0].keys() if rows else set()
    if {"step", "layer", "gate_share_compressed"} <= columns:
        return {"eval": "gates", "rows": rows}
    if {"step", "loss"} <= columns:
        return {"eval": "validations", "rows": rows}
    raise ValueError(f"{path} is neither a val.csv nor a layers.csv of a run")


def main(arguments: list[str]) -> int:
    check = arguments == ["--check"]
    if arguments and not check and any("=" not in given for given in arguments):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        if arguments and not check:
            print_table(arguments)
            return 0
        stale = []
        for page in pages():
            before = page.read_text(encoding="utf-8")
            after = fill(before)
            if after != before:
                stale.append(str(page.relative_to(ROOT)))
                if not check:
                    page.write_text(after, encoding="utf-8")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in stale:
        print(f"{name}: {'out of date, run python scripts/results_tables.py' if check else 'updated'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
