"""The packages of requirements-long.lock, which `make long-site` installs into a folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "out" / "long-site"


@pytest.fixture(scope="session")
def long_site() -> Path:
    """The folder, for ``PYTHONPATH`` of a process of its own."""
    if not (FOLDER / ".ready").exists():
        pytest.skip(f"{FOLDER} has no packages of requirements-long.lock: make long-site")
    return FOLDER
