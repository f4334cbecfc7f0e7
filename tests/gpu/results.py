"""Writes a text file with the machine, the versions and the outcome and figures of every test, as they come."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.target import header


class Results:
    """A plugin for pytest.

    Args:
        path: of the file.
        device: the value of ``--device``.
    """

    def __init__(self, path: Path, device: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self._counts: dict[str, int] = {}
        self._write(*header(device), "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a line for each test, and one for each figure that it recorded."""
        if report.when != "call" and report.outcome == "passed":
            return
        self._counts[report.outcome] = self._counts.get(report.outcome, 0) + 1
        phase = "" if report.when == "call" else f" in {report.when}"
        self._write(f"{report.outcome}{phase} {report.nodeid} ({report.duration:.2f} s)")
        self._write(*(f"    {name}: {value}" for name, value in report.user_properties))
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            self._write(f"    {report.longrepr[2]}")
        elif report.outcome == "failed":
            self._write(*(f"    ! {line}" for line in report.longreprtext.splitlines()[-30:]))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the sum."""
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self._counts.items()))
        self._write("", f"{counts or 'no tests'}; exit status {int(exitstatus)}")
        self._file.close()

    def _write(self, *lines: str) -> None:
        self._file.writelines(f"{line}\n" for line in lines)
        self._file.flush()  # a device that hangs must not take the outcomes along
