"""Traces, and the page that `rrfp report` writes of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from report import browser as chromium

from rrfp.costs import make_costs
from rrfp.lab.report import library
from rrfp.lab.simulation import simulate
from rrfp.trace.chrome import write_chrome
from rrfp.trace.job_data import TracedJob
from rrfp.trace.spans import StepTrace


@pytest.fixture(scope="session")
def plotting() -> None:
    """Skips a test where the page's library is not here."""
    if not library.PACKAGE.exists():
        pytest.skip(f"{library.NAME} {library.VERSION}, which make setup fetches with npm, is not here")


@pytest.fixture
def browser(plotting: None) -> Iterator[chromium.Browser]:
    """A window."""
    if chromium.PROGRAM is None:
        pytest.skip("chromium is not installed (Debian's package chromium)")
    with chromium.Browser() as window:
        yield window


def simulated(hint: str, limit: str, steps: int = 8, stages: int = 4, microbatches: int = 8) -> list[StepTrace]:
    """Steps of an uneven model with late messages."""
    tables = [
        make_costs("mllm", stages, microbatches, step=step, jitter="J2", latency="constant") for step in range(steps)
    ]
    return [simulate(table, hint=hint, limit=limit).result.trace(number) for number, table in enumerate(tables)]


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps in 1F1B's memory."""
    return write(tmp_path_factory.mktemp("report") / "bf.json", "bf", "1f1b")


def write(path: Path, hint: str, limit: str) -> Path:
    """A trace file."""
    write_chrome(path, simulated(hint, limit), name=hint, job=TracedJob(hint, limit, None))
    return path
