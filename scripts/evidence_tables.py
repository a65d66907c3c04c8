"""Tables of docs/results/evidence.md, for scripts/results_tables.py.

Runs of `STOP=1700 bash scripts/retrieval.sh train KIND ... --run.seed SEED` are docs/results/evidence/KIND-SEED-*;
those with the presets' own seed are among the files of retrieval and conversion. `bash scripts/evidence.sh production`
wrote docs/results/production.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

from result_files import RESULTS, by_context, by_step, change, losses, read_csv, read_eval, table
from retrieval_tables import step_times

FOLDER = RESULTS / "evidence"
TOKENS_PER_STEP = 65_536
STEP = 1700  # the end of the stage at 8,192
DENSE_STEP = 1300  # validated, and after about as many seconds as NSA needs for STEP
KINDS = {
    "dense": "dense",
    "dense-5e-4": "dense, learning rate 5e-4",
    "dense-2e-3": "dense, learning rate 2e-3",
    "dense-matched": "dense, wider FFN",
    "learned": "NSA, learned selectors",
    "compressed": "NSA, compressed scores",
    "two-branch": "two-branch, learned selectors",
    "block-sparse": "block-sparse, learned selectors",
    "all": "NSA, every block",
    "random": "NSA, random blocks",
}
TINY_RATE = 3e-3  # the preset's
TINY_SEEDS = 6  # 1 to 6
LENGTHS = (1024, 8192)  # at which the runs are evaluated
TASKS = {"niah_single_2": "one fact", "niah_multikey_1": "one of four", "niah_multikey_2": "only facts"}
# Held-out losses of the runs with the presets' seed
OWN_SEED = 1337
OWN = {
    "dense": [
        "retrieval/dense-validation.csv",
        "conversion/dense-perplexity.txt",
        "conversion/second/dense-validation.csv",
    ],
    "learned": ["retrieval/learned-validation.csv", "conversion/scratch-perplexity.txt"],
    "two-branch": ["retrieval/two-branch-validation.csv"],
    "block-sparse": ["retrieval/block-sparse-validation.csv"],
}


def _loss(path: Path) -> float:
    """Held-out loss at the end of the stage, from a validation during the run or from `tercet eval perplexity`."""
    if path.suffix == ".txt":
        return float(read_eval(path)["all"]["loss"])
    return losses(path)[STEP]


def seeds() -> list[int]:
    """Seeds of the runs in FOLDER."""
    return sorted({int(path.stem.split("-")[-2]) for path in FOLDER.glob("*-validation.csv")})


def found(seed: int, kind: str) -> list[float]:
    """Held-out losses of a kind with this seed."""
    if seed == OWN_SEED:
        return [_loss(RESULTS / name) for name in OWN.get(kind, [])]
    path = FOLDER / f"{kind}-{seed}-validation.csv"
    return [_loss(path)] if path.exists() else []


def against_dense(kind: str) -> list[float]:
    """Mean loss of a kind over that of dense with the same seed, for every seed that both have."""
    pairs = [(found(seed, kind), found(seed, "dense")) for seed in (OWN_SEED, *seeds())]
    return [statistics.fmean(mine) / statistics.fmean(base) for mine, base in pairs if mine and base]


def _parameters(kind: str) -> str:
    from tercet.config.load import load
    from tercet.model.cost import parameters

    configs = [*sorted(FOLDER.glob(f"{kind}-[0-9]*-config.toml")), RESULTS / "retrieval" / f"{kind}-config.toml"]
    return f"{parameters(load(file=configs[0]).config.model).total / 1e6:.1f}M"


def all_losses() -> str:
    """Every kind and seed, and each against dense with the same seed."""
    columns = [OWN_SEED, *seeds()]
    rows = []
    for kind, name in KINDS.items():
        cells = [", ".join(f"{loss:.4f}" for loss in sorted(found(seed, kind))) for seed in columns]
        if any(cells):
            ratios = against_dense(kind) if kind != "dense" else []
            mean = ""
            if len(ratios) > 2:
                error = statistics.stdev(ratios) / len(ratios) ** 0.5
                mean = f"**{change(statistics.fmean(ratios))}** ± {error:.1%}"
            rows.append([name, _parameters(kind), *cells, ", ".join(map(change, ratios)), mean])
    return table(["", "parameters", *(f"seed {seed}" for seed in columns), "vs dense", "mean ± error"], rows)


def equal_time() -> str:
    """Held-out losses when dense has trained for about as long, with the step times of the runs of retrieval."""
    columns = [OWN_SEED, *seeds()]
    rows, dense = [], []
    for kind, step in (("dense", DENSE_STEP), ("learned", STEP), ("two-branch", STEP)):
        others = [FOLDER / f"{kind}-{seed}-validation.csv" for seed in seeds()]
        after = [losses(path)[step] for path in (RESULTS / "retrieval" / f"{kind}-validation.csv", *others)]
        dense = dense or after
        ratios = [change(a / b) for a, b in zip(after, dense, strict=True)] if kind != "dense" else []
        seconds = f"{step_times(kind)[STEP] * step:.0f}"
        rows.append([KINDS[kind], f"{step:,}", seconds, *(f"{loss:.4f}" for loss in after), ", ".join(ratios)])
    return table(["", "steps", "seconds", *(f"seed {seed}" for seed in columns), "vs dense"], rows)


def _of_seed(seed: int, suffix: str) -> dict[str, Path]:
    paths = {kind: FOLDER / f"{kind}-{seed}-{suffix}" for kind in KINDS}
    return {kind: path for kind, path in paths.items() if path.exists()}


def positions() -> str:
    """Loss by the number of tokens before, of runs with the same seed, so with the same held-out text."""
    rows = []
    for seed in seeds():
        bins = {kind: read_eval(path)["by_position"] for kind, path in _of_seed(seed, "perplexity.txt").items()}
        if len({tuple(b["tokens"] for b in one) for one in bins.values()}) != 1:
            raise ValueError(f"seed {seed}: the models were evaluated on different text")
        shown = {kind: [b for b in one if b["first"] in (8, 64, 512, 1024, 2048, 4096)] for kind, one in bins.items()}
        head = ["seed", "tokens before", *(f"{b['first']:,}–{b['last']:,}" for b in next(iter(shown.values())))]
        rows += [[str(seed), KINDS[kind], *(f"{b['loss']:.4f}" for b in one)] for kind, one in shown.items()]
    return table(head, rows)


def retrieval() -> str:
    """Needles of `eval needle`, and of `eval ruler`, at the shortest and the longest length."""
    rows = []
    for seed in seeds():
        for kind, path in _of_seed(seed, "ruler.json").items():
            scores = {
                (f["length"], f["task"]): f
                for f in json.loads(path.read_text(encoding="utf-8"))["found"]
                if f["depth"] is None
            }
            needles = read_eval(FOLDER / f"{kind}-{seed}-needle.txt")["found"]
            right = [sum(f["right"] for f in needles if f["length"] == length) for length in LENGTHS]
            cells = [[f"{scores[length, task]['score']:.0%}" for length in LENGTHS] for task in TASKS]
            rows.append([str(seed), KINDS[kind], " / ".join(map(str, right)), *map(" / ".join, cells)])
    head = ["seed", "found at 1k / 8k", "sentences", *TASKS.values()]
    return table(head, rows)


def _tiny(kind: str, corpus: str = "linux") -> dict[tuple[float, int], float]:
    """Held-out loss by learning rate and seed."""
    return {
        (float(row["learning_rate"]), int(row["seed"])): float(row["validation_loss"])
        for row in read_csv(FOLDER / "tiny-seeds.csv")
        if (row["kind"], row["corpus"]) == (kind, corpus)
    }


def tiny_rates() -> str:
    """Mean loss over the seeds that all learning rates share; the best of each kind in bold."""
    found = {kind: _tiny(kind) for kind in ("nsa", "dense")}
    rates = sorted({rate for rate, _ in found["nsa"]})
    seeds = set.intersection(*({seed for at, seed in found["nsa"] if at == rate} for rate in rates))
    means = {
        kind: {rate: statistics.fmean(by[rate, seed] for seed in seeds) for rate in rates} for kind, by in found.items()
    }
    best = {kind: min(by.values()) for kind, by in means.items()}
    rows = []
    for rate in rates:
        cells = [f"**{by[rate]:.3f}**" if by[rate] == best[kind] else f"{by[rate]:.3f}" for kind, by in means.items()]
        rows.append([f"{rate:g}", *cells, change(means["nsa"][rate] / means["dense"][rate])])
    rows.append(["best of each", *(f"{loss:.3f}" for loss in best.values()), change(best["nsa"] / best["dense"])])
    return table(["learning rate", "NSA", "dense", "NSA vs dense"], rows)


def tiny_seeds() -> str:
    """With the preset's learning rate: the loss of every seed, and NSA's against dense and a dense of NSA's size."""
    columns: list[list[str]] = []
    shown: set[str] = set()
    for kind, corpus in (("dense", "linux"), ("dense-matched", "linux"), ("dense", "manuals")):
        nsa, dense = _tiny("nsa", corpus), _tiny(kind, corpus)
        seeds = sorted(seed for rate, seed in dense if rate == TINY_RATE)
        losses_of = [[by[TINY_RATE, seed] for seed in seeds] for by in (nsa, dense)]
        ratios = [one / base for one, base in zip(*losses_of, strict=True)]
        spread = statistics.stdev(ratios)
        empty = [""] * (TINY_SEEDS - len(seeds))
        for values in losses_of[1:] if corpus in shown else losses_of:  # NSA's column once per corpus
            columns.append([*(f"{loss:.3f}" for loss in values), *empty, f"{statistics.fmean(values):.3f}", ""])
        shown.add(corpus)
        mean, error = f"**{change(statistics.fmean(ratios))}**", f"{spread:.1%} ({spread / len(ratios) ** 0.5:.2%})"
        columns.append([*map(change, ratios), *empty, mean, error])
    labels = [*map(str, range(1, TINY_SEEDS + 1)), "**mean**", "standard deviation (error)"]
    head = ["seed", "NSA", "dense", "vs dense", "dense, wider FFN", "vs wider"]
    head += ["NSA, manuals", "dense, manuals", "vs dense"]
    return table(head, [list(row) for row in zip(labels, *columns, strict=True)])


# The second corpus

PRODUCTION = RESULTS / "production"
PRODUCTION_RUNS = {"two-branch": "production", "dense": "production-dense"}


def production_losses() -> str:
    """Held-out loss at each quarter of the run."""
    records = {}
    for name, run in PRODUCTION_RUNS.items():
        rows = read_csv(PRODUCTION / f"{run}-validation.csv")
        quarter = len(rows) // 4
        records[name] = {"rows": rows[quarter - 1 :: quarter]}
    return by_step(records)


def production_time() -> str:
    """Held-out loss of both, and of dense when it has trained for about as long as two-branch."""
    rows = []
    limit = 0.0  # seconds of two-branch
    for name, run in PRODUCTION_RUNS.items():
        speed = statistics.median(float(row["tokens_per_s"]) for row in read_csv(PRODUCTION / f"{run}-training.csv"))
        found = losses(PRODUCTION / f"{run}-validation.csv")
        seconds = {step: step * TOKENS_PER_STEP / speed for step in found}
        limit = limit or max(seconds.values())
        for step in sorted({min(seconds, key=lambda at: abs(seconds[at] - limit)), max(found)}):
            rows.append([name, f"{speed / 1000:.0f}k", f"{step:,}", f"{seconds[step]:.0f}", f"{found[step]:.4f}"])
    return table(["", "tokens/s", "steps", "seconds", "loss"], rows)


def production_positions() -> str:
    records = {name: read_eval(PRODUCTION / f"{run}-perplexity.txt") for name, run in PRODUCTION_RUNS.items()}
    return by_context(records, first=8)


# Optimizers


def optimizers() -> str:
    """Held-out loss of Muon at two learning rates, and of AdamW."""
    names = {"Muon, 3e-3": "muon-3e-3", "Muon, 1e-3": "muon-1e-3", "AdamW": "adamw"}
    records = {}
    for name, run in names.items():
        rows = read_csv(FOLDER / f"optimizers-{run}.csv")
        records[name] = {"rows": [row for row in rows if int(row["step"]) % 100 == 0]}
    return by_step(records)


TABLES: dict[str, Callable[[], str]] = {
    "evidence-losses": all_losses,
    "evidence-time": equal_time,
    "evidence-positions": positions,
    "evidence-retrieval": retrieval,
    "evidence-optimizers": optimizers,
    "production-losses": production_losses,
    "production-time": production_time,
    "production-positions": production_positions,
    "tiny-seeds": tiny_seeds,
    "tiny-rates": tiny_rates,
}
