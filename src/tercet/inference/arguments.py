"""Arguments of `tercet generate` and `tercet eval`, and the checks of them that need no torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from tercet.atomic_io import check_writable
from tercet.config.data import DataConfig
from tercet.config.flags import Arg
from tercet.data.files import SUFFIXES, check_paths
from tercet.errors import UsageError
from tercet.train import manifest

Run = Annotated[Path, Arg("A run folder (its newest checkpoint), a checkpoint, or a folder of imported weights.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], Arg("Device to run on.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    Arg("Weights and arithmetic; auto: bfloat16 on a GPU if the model was trained in bfloat16, else float32."),
]
Plot = Annotated[Path | None, Arg("Write a plot to this SVG file.")]
DataOf = Annotated[
    Path | None,
    Arg("Read the validation text of this run, to compare models that were trained with different data or seeds."),
]
RulerTask = Literal[
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe",
]  # fmt: skip

WEIGHTS = "model.safetensors"
CONFIG = "config.toml"


class ModelError(UsageError):
    """A model that cannot be loaded."""


def check_model(path: str | Path) -> Path:
    """The folder of a model, without `~`. Raises if it has neither a checkpoint nor imported weights."""
    path = Path(path).expanduser()
    if not path.exists():
        raise ModelError(f"{path} does not exist: pass a run folder, a checkpoint, or a folder of imported weights")
    if has_weights(path) or _has_checkpoint(path):
        return path
    if manifest.step_of(path) is None and (path / "config.json").is_file():
        raise ModelError(
            f"{path} is a Hugging Face folder: load it with transformers, or convert it with "
            f"`tercet import hf {path} OUT`"
        )
    unfinished = [p.name for p in path.glob("**/.writing-*")]
    more = f" ({unfinished[0]} is unfinished)" if unfinished else ""
    raise ModelError(
        f"{path} has no checkpoint{more}: pass a run folder with checkpoints/, a checkpoint folder with "
        f"{manifest.MANIFEST}, or a folder with {CONFIG} and {WEIGHTS}"
    )


def has_weights(path: Path) -> bool:
    """Whether this is a folder of weights with a config.toml, as `tercet import hf` writes."""
    return (path / CONFIG).is_file() and (path / WEIGHTS).is_file()


def _has_checkpoint(path: Path) -> bool:
    return (path / manifest.MANIFEST).is_file() or any(map(manifest.complete_checkpoints, (path / "checkpoints", path)))


def at_least_one(**values: int | None) -> None:
    """Raise for the first value below 1. None stands for a default."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise UsageError(f"{name}={value} must be at least 1")


def check_known(flag: str, given: Sequence[str], known: Iterable[str], *, may_be_empty: bool = False) -> None:
    """Raise for the first name that is not one of the known ones, and if there is none."""
    if unknown := [name for name in given if name not in known]:
        raise UsageError(f"{flag} {unknown[0]} is unknown: pick from {', '.join(known)}")
    if not given and not may_be_empty:
        raise UsageError(f"{flag} is empty: pick from {', '.join(known)}")


def check_depths(depths: Sequence[float]) -> None:
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise UsageError(f"depths={depths} must be numbers from 0 to 1")


def check_recall(data: DataConfig) -> None:
    """Raise unless this is the data of a model of the recall task."""
    if data.synthetic.task != "recall":
        trained = data.synthetic.task if data.source == "synthetic" else data.source
        raise UsageError(
            f"the model was trained on {trained}, not on the recall task: train with --data.source synthetic "
            "--data.synthetic.task recall, or use `tercet eval needle`"
        )


def own_text(path: Path, text_field: str = "text") -> DataConfig:
    """All the text of --data in its order, once: a file or a folder of text, jsonl, parquet or shards."""
    path = path.expanduser()
    check_paths([str(path)])
    names = [file.name for file in path.rglob("*")] if path.is_dir() else [path.name]
    kinds = [kind for kind in ("jsonl", "parquet") if any(name.endswith(SUFFIXES[kind]) for name in names)]
    if (path / "manifest.json").is_file():
        kinds = ["shards"]
    if len(kinds) > 1:
        raise UsageError(f"--data {path} has both {' and '.join(kinds)} files: name one file, or a folder of one kind")
    source = kinds[0] if kinds else "text"
    if source in ("text", "shards") and text_field != "text":
        raise UsageError(f"--text-field {text_field} has no effect: --data {path} is {source}, without fields; drop it")
    values = {"source": source, "path": str(path), "text_field": text_field}
    return DataConfig.model_validate(values | {"validation_fraction": 0, "shuffle": False, "exhaustion": "stop"})


def check_plot(plot: Path | None) -> None:
    """Fail before measuring if the plot could not be written."""
    if plot is None:
        return
    if plot.suffix.lower() != ".svg":
        raise UsageError(f"--plot {plot} does not end in .svg, the only format: choose a name that does")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"--plot {plot} needs matplotlib: pip install 'tercet[report]', or drop --plot")
    check_writable("--plot", plot)


def read_prompt_file(path: Path) -> str:
    """The text of --prompt-file; - is standard input."""
    try:
        if str(path) != "-":
            return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--prompt-file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt-file {path} is not UTF-8 text (byte {error.start}): convert it") from None
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text (byte {error.start}): convert it") from None
