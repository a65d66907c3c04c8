"""Rules of the code base that no linter checks: layers, import cycles, start-up imports, environment variables."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "tercet"

# Top to bottom. A package imports from lower layers only; packages of one layer do not import each other.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"plan", "bench", "report", "inference", "interop"},
    {"train"},
    {"doctor"},
    {"parallel", "telemetry", "data"},
    {"config"},
    {"model"},
    {"attention"},
    {"atomic_io", "errors", "hints", "parse", "terminal", "version"},
]
LEVEL = {name: len(LAYERS) - i for i, layer in enumerate(LAYERS) for name in layer}
SAME_LAYER = {
    ("interop", "inference"),  # an export loads a run the way generation does
    ("bench", "inference"),  # the decode benchmark runs generation's decoder
    ("atomic_io", "errors"),  # a file that cannot be written is an error of the command line
    ("parse", "errors"),  # and so is a number of torchrun that is none
}

FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")
MODULES = {
    ".".join(("tercet", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in FILES
}


def imports(module: str) -> set[str]:
    """Modules of this package that a module imports, inside functions and TYPE_CHECKING blocks too."""
    path, found = MODULES[module], set()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1, f"{module}: write absolute imports instead of `from ..`"
            base = ".".join([*package, *filter(None, [node.module])]) if node.level else node.module or ""
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names}
    return {name for name in found if name in MODULES} - {module}


@cache
def import_graph() -> dict[str, set[str]]:
    return {module: imports(module) for module in MODULES}


def package_of(module: str) -> str:
    return module.split(".")[1]


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Modules of one import cycle, or an empty list."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph[module]):
            if cycle := visit(other, [*path, module]):
                return cycle
        done.add(module)
        return []

    return next((cycle for module in sorted(graph) if (cycle := visit(module, []))), [])


def test_imports_point_down():
    unknown = {package_of(m) for m in MODULES} - LEVEL.keys()
    assert not unknown, f"give {unknown} a place in LAYERS"
    upward = [
        f"{module} imports {other}"
        for module, others in import_graph().items()
        for other in others
        if (here := package_of(module)) != (there := package_of(other))
        and LEVEL[there] >= LEVEL[here]
        and (here, there) not in SAME_LAYER
    ]
    assert upward == []


def test_there_are_no_import_cycles():
    assert find_cycle(import_graph()) == []


def test_a_cycle_would_be_found():
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


@pytest.mark.parametrize(
    "modules",
    [
        "tercet; tercet.NSAConfig()",
        "tercet.cli",
        "tercet.config.load, tercet.config.flags, tercet.plan",
        "tercet.data.commands, tercet.data.tokenizers, tercet.data.sources",
        "tercet.report.commands, tercet.report.pages",
    ],
)
def test_torch_is_not_loaded_by(modules):
    code = f"import sys, {modules}; print(sorted(m for m in sys.modules if m == 'torch' or m.startswith('torch.')))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


# CI systems set CI, torchrun the rest. Whether Triton interprets must be known before Triton is imported.
TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
READABLE = {"CI", "TORCHELASTIC_RESTART_COUNT", "TRITON_INTERPRET", *TORCHRUN}
# Setting a variable that a library reads is allowed.
WRITES = {"update", "setdefault"}


def environment_reads(path: Path) -> list[str]:
    """Variables that a file reads; `?` where the name is not a literal."""
    text = path.read_text(encoding="utf-8")
    if "environ" not in text and "getenv" not in text:
        return []
    tree = ast.parse(text)
    parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    reads = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")):
            continue
        parent = parents[id(node)]
        if isinstance(parent, ast.Subscript) and not isinstance(parent.ctx, ast.Load):
            continue
        if isinstance(parent, ast.Attribute) and parent.attr in WRITES:
            continue
        holder = parents[id(parent)] if isinstance(parent, ast.Attribute) else parent
        candidates = [getattr(holder, "slice", None), getattr(holder, "left", None), *getattr(holder, "args", [])[:1]]
        names = [c.value for c in candidates if isinstance(c, ast.Constant)]
        reads.append(str(names[0]) if names else "?")
    return reads


def test_environment_variables_do_not_configure_anything():
    for path in FILES:
        # cli.py passes the environment to the warnings about variables of former scripts.
        reads = [] if path == SOURCE / "cli.py" else environment_reads(path)
        assert set(reads) <= READABLE, f"{path.relative_to(SOURCE)} reads {set(reads) - READABLE}"


def test_an_environment_read_would_be_found(tmp_path):
    writes = ["os.environ['SET'] = '1'", "os.environ.update(SET='1')", "os.environ.setdefault('SET', '1')"]
    reads = ["os.environ['A']", "os.environ.get('B', 0)", "os.getenv('C')", "'D' in os.environ", "dict(os.environ)"]
    (tmp_path / "x.py").write_text("\n".join(["import os", *writes, *reads]))
    assert sorted(environment_reads(tmp_path / "x.py")) == ["?", "A", "B", "C", "D"]
