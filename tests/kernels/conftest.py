"""Tests marked `interpreter` run in Triton's interpreter, on any machine.

Triton decides at import whether kernels are compiled or interpreted, for the whole process. So interpreter tests run in
a child process with TRITON_INTERPRET=1, one for each pytest process, which takes node ids and sends reports back. For
pytest they are ordinary tests: select them by name and run them in parallel as usual. With TRITON_INTERPRET=1 set, they
run directly.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = ["test_compiles.py"] if INTERPRETING else []

_PIPES = "TERCET_TEST_PIPES"  # in a child's environment: file descriptors to read node ids from and to write reports to
_MARK = "interpreter"


class Child:
    """A pytest process that runs tests in the interpreter, one by one, as they are requested."""

    def __init__(self, session: pytest.Session) -> None:
        self.config = session.config
        files = sorted({str(x.path) for x in session.items if x.get_closest_marker(_MARK) is not None})
        nodes_read, nodes_write = os.pipe()
        reports_read, reports_write = os.pipe()
        environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment[_PIPES] = f"{nodes_read},{reports_write}"
        options = ["-q", "-m", _MARK, "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={self.config.rootpath}"]
        self.output = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *files],
            cwd=self.config.rootpath,
            env=os.environ | environment,
            pass_fds=(nodes_read, reports_write),
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )
        os.close(nodes_read)
        os.close(reports_write)
        self.nodes, self.reports = os.fdopen(nodes_write, "wb"), os.fdopen(reports_read, "rb")

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[pytest.TestReport]:
        """Setup, call and teardown, as they come in. Fixtures that `nextitem` shares are kept for it."""
        try:
            pickle.dump((item.nodeid, nextitem and nextitem.nodeid), self.nodes)
            self.nodes.flush()
            while True:
                data = pickle.load(self.reports)
                report = self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
                yield report
                if report.when == "teardown":
                    return
        except (EOFError, BrokenPipeError):
            self.process.wait()
            self.output.seek(0)
            output = self.output.read().decode(errors="replace")
            pytest.exit(f"the interpreter ended without a report of {item.nodeid}:\n{output[-6000:]}", returncode=1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.nodes, self.reports, self.output):
            stream.close()


_children: list[Child] = []  # one at most


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if INTERPRETING or item.get_closest_marker(_MARK) is None:
        return None
    if not _children:
        _children.append(Child(item.session))
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _children[0].run(item, nextitem):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # The test before this one kept its folder's fixtures for it; release what the next one does not share.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def pytest_sessionfinish() -> None:
    while _children:
        _children.pop().close()


# ------------------------------------------------------------ in the child

if INTERPRETING:
    from kernels import fast_interpreter

    fast_interpreter.install()

if INTERPRETING and _PIPES in os.environ:
    _read, _write = map(int, os.environ.pop(_PIPES).split(","))
    _nodes, _reports = os.fdopen(_read, "rb"), os.fdopen(_write, "wb")

    class Reporter:
        def __init__(self, config: pytest.Config) -> None:
            self.config = config

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
            pickle.dump(data, _reports)
            _reports.flush()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(session: pytest.Session) -> bool:
        session.config.pluginmanager.register(Reporter(session.config))
        items = {x.nodeid: x for x in session.items}
        while True:
            try:
                node, following = pickle.load(_nodes)
            except EOFError:
                return True
            session.ihook.pytest_runtest_protocol(item=items[node], nextitem=items.get(following))
