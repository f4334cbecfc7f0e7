"""Every name and file of the package that a page mentions exists."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
from installed import ROOT

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

#: Names that are no modules or attributes: entry point groups.
GROUPS = {"rrfp.lanes"}


def resolves(name: str) -> bool:
    """Whether the longest module in ``name`` has the attributes behind it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return part in getattr(found, "__annotations__", ())
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_and_files_of_the_package_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"`(rrfp(?:\.\w+)+)", text))
    for home, imported in re.findall(r"^ *from (rrfp[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
        names |= {f"{home}.{name.partition(' as ')[0].strip()}" for name in imported.split(",")}
    assert sorted(name for name in names - GROUPS if not resolves(name)) == []
    files = re.findall(r"(?<![\w/])((?:rrfp|tests|examples|benchmarks)/[\w/]+\.py)", text)
    assert sorted({file for file in files if not (ROOT / file).is_file()}) == []
