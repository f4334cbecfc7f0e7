"""Workers of a benchmark that die or hang: one error, which says what was awaited."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.shared.workers import run_workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def worker(tmp_path: Path, then: str) -> Path:
    script = tmp_path / "worker.py"
    script.write_text(f"import os, signal\nprint('{{}}', flush=True)\n{then}\n")
    return script


@pytest.mark.parametrize(
    ("then", "patience", "error"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 50.0, "a worker ended with exit code 1: waited for step 7"),
        ("signal.pause()", 3.0, "no worker reported for 3 s: waited for step 7"),
    ],
)
def test_workers_that_die_or_hang_end_the_benchmark(tmp_path: Path, then: str, patience: float, error: str) -> None:
    reports = run_workers(worker(tmp_path, then), 1, awaited=lambda: "step 7", patience=patience)

    with pytest.raises(SystemExit, match=error):
        list(reports)
