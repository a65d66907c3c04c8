"""The house's rules that no linter knows: arrows point down, and the doorstep is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "tercet"

# Higher rooms may import lower ones, never the other way; rooms of one floor may not see each other.
FLOORS = [
    {"__main__"},
    {"cli"},
    {"plan", "bench", "report", "inference", "interop"},
    {"train"},
    {"doctor"},
    {"parallel", "telemetry", "data"},
    {"config"},
    {"model"},
    {"attention"},
    {"errors", "durable", "typed"},
]
HEIGHT = {room: len(FLOORS) - i for i, floor in enumerate(FLOORS) for room in floor}
# A dense baseline for a bench, a verdict, … may come to need a neighbour: say so here, with the reason.
NEIGHBOURS = {
    ("interop", "inference"),  # an export begins by loading a run as generation does
    ("bench", "inference"),  # a bench of decoding takes the steps that generation takes
}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms named by any import in the file, those inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1, f"{path}: an import through .. hides which room is meant"
            names = [] if node.level else [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "tercet" and len(parts) > 1 and (parts[1] in HEIGHT or (SOURCE / parts[1]).exists()):
                found.add(parts[1])
    return found


FILES = sorted(p for p in SOURCE.rglob("*.py") if p != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_arrows_point_down(path):
    here = room_of(path)
    assert here in HEIGHT, f"{here} has no floor: give it one in FLOORS"
    for other in imported_rooms(path) - {here}:
        assert HEIGHT[other] < HEIGHT[here] or (here, other) in NEIGHBOURS, f"{here} must not import {other}"


@pytest.mark.parametrize("module", ["tercet", "tercet.cli", "tercet.config.load", "tercet.config.flags", "tercet.plan"])
def test_torch_is_not_loaded_by(module):
    code = f"import sys, {module}; print(sorted(m for m in sys.modules if m == 'torch' or m.startswith('torch.')))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_every_room_is_imported_by_somebody_or_is_a_door():
    doors = {"cli", "__main__", "report", "doctor", "inference", "interop", "bench"}
    used = set().union(*(imported_rooms(p) - {room_of(p)} for p in FILES))
    assert {room_of(p) for p in FILES} - used - doors == set()


# CI systems set CI, torchrun tells ranks who they are, and whether Triton's interpreter is on can be asked of Triton
# only by importing it. Nothing else may be asked of the environment.
TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
MAY_BE_READ = {"CI", "TORCHELASTIC_RESTART_COUNT", "TRITON_INTERPRET", *TORCHRUN}
# Telling a library what it asks the environment for is not reading it.
WRITES = {"update", "setdefault"}


def environment_reads(path: Path) -> list[str]:
    """Variables that a file reads; `?` where the name is not written down."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    reads = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")):
            continue
        above = parents[id(node)]
        if isinstance(above, ast.Subscript) and not isinstance(above.ctx, ast.Load):
            continue
        if isinstance(above, ast.Attribute) and above.attr in WRITES:
            continue
        holder = parents[id(above)] if isinstance(above, ast.Attribute) else above
        candidates = [getattr(holder, "slice", None), getattr(holder, "left", None), *getattr(holder, "args", [])[:1]]
        names = [c.value for c in candidates if isinstance(c, ast.Constant)]
        reads.append(str(names[0]) if names else "?")
    return reads


def test_no_behaviour_hides_in_the_environment():
    for path in FILES:
        # cli.py hands the environment to the warnings about former switches, which only name what they find.
        reads = [] if path == SOURCE / "cli.py" else environment_reads(path)
        assert set(reads) <= MAY_BE_READ, f"{path.relative_to(SOURCE)} reads {set(reads) - MAY_BE_READ}"


def test_a_read_of_the_environment_would_be_found(tmp_path):
    writes = ["os.environ['SET'] = '1'", "os.environ.update(SET='1')", "os.environ.setdefault('SET', '1')"]
    reads = ["os.environ['A']", "os.environ.get('B', 0)", "os.getenv('C')", "'D' in os.environ", "dict(os.environ)"]
    (tmp_path / "x.py").write_text("\n".join(["import os", *writes, *reads]))
    assert sorted(environment_reads(tmp_path / "x.py")) == ["?", "A", "B", "C", "D"]


def test_what_several_tests_need_is_defined_once():
    """A class that stands in two test files is shared (tests/runs.py, watched.py, stepping.py, …), or named apart."""
    defined: dict[str, list[str]] = {}
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, []).append(path.name)
    assert {name: files for name, files in defined.items() if len(files) > 1} == {}
