"""A picture's file holds the format that its name says, or does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from callbacks.test_files import largest_file

from rrfp.costs import make_costs
from rrfp.errors import ConfigError
from rrfp.lab.simulation import simulate
from rrfp.lab.traces.timeline import plot_timelines
from rrfp.trace.spans import StepTrace

BEGINNINGS = {"a.png": b"\x89PNG", "a.svg": b"<?xml", "a.pdf": b"%PDF", "A.SVG": b"<?xml"}


def timelines() -> list[tuple[str, StepTrace]]:
    return [("bf", simulate(make_costs("llm", 2, 3), hint="bf").result.trace())]


@pytest.mark.parametrize("name", BEGINNINGS)
def test_the_suffix_decides_the_format(tmp_path: Path, name: str) -> None:
    plot_timelines(timelines(), tmp_path / name)
    written = (tmp_path / name).read_bytes()
    assert written.startswith(BEGINNINGS[name])
    assert (b"<svg" in written) == name.lower().endswith(".svg")


@pytest.mark.parametrize(("name", "suffix"), [("a.bmp", ".bmp"), ("a", ""), ("a.png.gz", ".gz")])
def test_any_other_suffix_is_refused_before_the_picture_is_drawn(tmp_path: Path, name: str, suffix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plot_timelines([], tmp_path / name)  # drawn, nothing at all would be refused
    path = tmp_path / name
    assert str(caught.value) == f"{path}: the suffix of a picture is {suffix!r}, must be one of: .png, .svg, .pdf"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_picture_or_none(tmp_path: Path) -> None:
    old = tmp_path / "old.png"
    plot_timelines(timelines(), old)
    before = old.read_bytes()
    for name in ("new.png", "new.svg", "new.pdf", "old.png"):
        with largest_file(1000), pytest.raises(ConfigError, match=rf"{name}: cannot be written \(File too large\)$"):
            plot_timelines(timelines(), tmp_path / name)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"old.png": before}
