"""Tests marked `interpreter` run in Triton's interpreter, on any machine.

Triton decides at import whether kernels are compiled or interpreted, for the whole process. So the interpreter tests of
a file run in one child process with TRITON_INTERPRET=1, which sends its reports back. For pytest they are ordinary
tests: select them by name and run them in parallel (`-n 2 --dist loadfile`) as usual. With TRITON_INTERPRET=1 set, they
run directly.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = ["test_compiles.py"] if INTERPRETING else []

_PIPES = "TERCET_TEST_PIPES"  # in a child's environment: file descriptors to read node ids from and to write reports to


class Child:
    """A pytest process that runs the given tests of one file in the interpreter."""

    def __init__(self, file: Path, nodes: list[str], config: pytest.Config) -> None:
        self.config, self.reports = config, dict[str, list[pytest.TestReport]]()
        nodes_read, nodes_write = os.pipe()
        reports_read, reports_write = os.pipe()
        environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment[_PIPES] = f"{nodes_read},{reports_write}"
        options = ["-q", "-m", "", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={config.rootpath}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, str(file)],
            cwd=config.rootpath,
            env=os.environ | environment,
            pass_fds=(nodes_read, reports_write),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        os.close(nodes_read)
        os.close(reports_write)
        with os.fdopen(nodes_write, "wb") as pipe:
            pickle.dump(nodes, pipe)
        self.pipe = os.fdopen(reports_read, "rb")

    def reports_of(self, node: str) -> Iterator[pytest.TestReport]:
        """Setup, call and teardown, as they come in."""
        while True:
            for report in self.reports.pop(node, []):
                yield report
                if report.when == "teardown":
                    return
            try:
                data = pickle.load(self.pipe)
            except EOFError:
                output = self.process.communicate()[0]
                pytest.exit(f"the interpreter ended without a report of {node}:\n{output[-6000:]}", returncode=1)
            report = self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
            self.reports.setdefault(report.nodeid, []).append(report)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.pipe.close()


_children: dict[Path, Child] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if INTERPRETING or item.get_closest_marker("interpreter") is None:
        return None
    if item.path not in _children:
        for child in _children.values():  # files run one after another
            child.close()
        _children.clear()
        nodes = [x.nodeid for x in item.session.items if x.path == item.path]
        _children[item.path] = Child(item.path, nodes, item.config)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _children[item.path].reports_of(item.nodeid):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # The test before this one kept its folder's fixtures for it; release what the next one does not share.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def pytest_sessionfinish() -> None:
    for child in _children.values():
        child.close()
    _children.clear()


# ------------------------------------------------------------ in the child

if INTERPRETING and _PIPES in os.environ:
    _read, _write = map(int, os.environ.pop(_PIPES).split(","))
    with os.fdopen(_read, "rb") as _pipe:
        _nodes = set(pickle.load(_pipe))
    _reports = os.fdopen(_write, "wb")

    class Reporter:
        def __init__(self, config: pytest.Config) -> None:
            self.config = config

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
            pickle.dump(data, _reports)
            _reports.flush()

    def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
        items[:] = [x for x in items if x.nodeid in _nodes]
        config.pluginmanager.register(Reporter(config))
