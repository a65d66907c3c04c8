"""Arguments that the commands which use a model share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

Run = Annotated[
    Path, tyro.conf.arg(help="A run folder (its newest checkpoint), a checkpoint, or a folder of imported weights.")
]
Device = Annotated[Literal["auto", "cpu", "cuda"], tyro.conf.arg(help="Where to compute.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    tyro.conf.arg(
        help="Of weights and arithmetic; auto is bfloat16 on a GPU if the model was trained so, else float32."
    ),
]
Plot = Annotated[Path | None, tyro.conf.arg(help="Draw it into this SVG file.")]
