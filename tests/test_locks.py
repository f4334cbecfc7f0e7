"""The pinned packages."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]


def test_they_install_on_the_oldest_python_that_the_project_names() -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    oldest = f"{named.removeprefix('>=')}.0"
    locks = "".join((ROOT / name).read_text() for name in ("requirements.lock", "requirements-no-deps.lock"))
    pinned = re.findall(r"^([\w.-]+)==", locks, re.MULTILINE)
    assert pinned
    needs = {name: str(metadata(name).json.get("requires_python", "")) for name in pinned}
    assert {name: need for name, need in needs.items() if not SpecifierSet(need).contains(oldest)} == {}
