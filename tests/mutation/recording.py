"""A pytest plugin: which tests run which lines of the packages under mutation, and how long each test takes.

Used by `mutation.coverage_map` as ``pytest -p mutation.recording``; the environment says where the answer goes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

#: Where the answer goes, and the folders to watch, separated by colons.
TARGET, WATCHED = "RRFP_MUTATION_MAP", "RRFP_MUTATION_WATCHED"

_recorder: _Recorder | None = None


class _Recorder:
    def __init__(self, folders: list[str]) -> None:
        self._coverage = coverage.Coverage(
            data_file=None, include=[f"{folder}/*" for folder in folders], config_file=False, concurrency=["thread"]
        )
        self._coverage.start()
        self.seconds: dict[str, float] = {}

    def begin(self, test: str) -> None:
        self._coverage.switch_context(test)

    def document(self) -> dict[str, object]:
        self._coverage.stop()
        data = self._coverage.get_data()
        lines: dict[str, dict[int, list[str]]] = {}
        for file in data.measured_files():
            by_line = data.contexts_by_lineno(file)
            lines[str(Path(file).relative_to(Path.cwd()))] = {
                line: [test for test in tests if test in self.seconds] for line, tests in by_line.items()
            }
        return {"seconds": self.seconds, "lines": lines}


def pytest_configure() -> None:
    global _recorder
    _recorder = _Recorder(os.environ[WATCHED].split(":"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Campaigns of many seeds, which run in batches, take too long to be asked.

    No test has a limit: an exception raised by a timer inside the tracer would leave its lock held for good.
    """
    items[:] = [item for item in items if "first" not in getattr(getattr(item, "callspec", None), "params", {})]
    for item in items:
        item.add_marker(pytest.mark.timeout(0), append=False)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    assert _recorder is not None
    _recorder.begin(item.nodeid)
    began = time.monotonic()
    yield
    _recorder.seconds[item.nodeid] = time.monotonic() - began


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # A test that fails with nothing changed can show nothing.
    if report.failed:
        FAILED.add(report.nodeid)


FAILED: set[str] = set()


def pytest_sessionfinish() -> None:
    assert _recorder is not None
    for test in FAILED:
        _recorder.seconds.pop(test, None)
    Path(os.environ[TARGET]).write_text(json.dumps(_recorder.document()))
