"""Tables of docs/results/block-settings.md, for scripts/results_tables.py."""

from __future__ import annotations

from collections.abc import Callable

from result_files import (
    RESULTS,
    Records,
    by_context,
    by_step,
    change,
    losses,
    needles,
    needles_found,
    read_csv,
    read_eval,
    span,
    table,
)

SETTINGS = RESULTS / "block-settings"


def _settings_evals(kind: str) -> Records:
    names = {"NSA": "nsa", "paper's φ": "paper", "dense": "dense"}
    return {label: read_eval(SETTINGS / f"{kind}-{name}.txt") for label, name in names.items()}


def settings_context() -> str:
    return by_context(_settings_evals("perplexity"), first=8)


def settings_needles() -> str:
    """Needles found by length."""
    found = {name: needles_found(record) for name, record in _settings_evals("needle").items()}
    rows = [[name, *(str(right) for right, _ in by.values())] for name, by in found.items()]
    return table(["", *(f"{n:,}" for n in found["NSA"])], rows)


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
        record = read_eval(SETTINGS / "choice" / f"{name}-needle.txt")
        nats = {(f["length"], f["depth"]): f["nats"] for f in record["found"]}
        cells = [
            f"{right} of {asked} ({nats[n, 0.9]:.2f}, {nats[n, 0.6]:.2f})"
            for n, (right, asked) in needles_found(record).items()
        ]
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


TABLES: dict[str, Callable[[], str]] = {
    "settings-context": settings_context,
    "settings-needles": settings_needles,
    "tiny-choice": tiny_choice,
    "toy": toy,
    "toy-keys": toy_keys,
    "small-models": small_models,
    "small-context": small_context,
    "small-needles": small_needles,
    "windows-validation": windows_validation,
    "windows-context": windows_context,
    "windows-needles": windows_needles,
}
