"""A picture's file holds the format that its name says, or does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from rrfp.costs import make_costs
from rrfp.errors import ConfigError
from rrfp.lab.simulation import simulate
from rrfp.lab.traces.picture_file import save_picture
from rrfp.lab.traces.plot import plot_timelines

BEGINNINGS = {"a.png": b"\x89PNG", "a.svg": b"<?xml", "a.pdf": b"%PDF", "A.SVG": b"<?xml"}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_the_suffix_decides_the_format(tmp_path: Path, name: str) -> None:
    save_picture(tmp_path / name, lambda: Figure(figsize=(1, 1)))
    assert (tmp_path / name).read_bytes().startswith(BEGINNINGS[name])


@pytest.mark.parametrize(("name", "suffix"), [("a.bmp", ".bmp"), ("a", ""), ("a.png.gz", ".gz")])
def test_any_other_suffix_is_refused_before_the_picture_is_drawn(tmp_path: Path, name: str, suffix: str) -> None:
    def draw() -> Figure:
        raise AssertionError("drawn in vain")

    with pytest.raises(ConfigError) as caught:
        save_picture(tmp_path / name, draw)
    path = tmp_path / name
    assert str(caught.value) == f"{path}: the suffix of a picture is {suffix!r}, must be one of: .png, .svg, .pdf"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no/a\.png: cannot be written \(No such file"):
        save_picture(tmp_path / "no" / "a.png", lambda: Figure(figsize=(1, 1)))


def test_a_timeline_is_written_as_svg(tmp_path: Path) -> None:
    plot_timelines([("bf", simulate(make_costs("llm", 2, 3), hint="bf").result.trace())], tmp_path / "t.svg")
    assert "<svg" in (tmp_path / "t.svg").read_text()
