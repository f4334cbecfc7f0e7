"""docs/top.svg is what tests/docs/top_picture.py draws."""

from __future__ import annotations

import html
import re
from pathlib import Path

from docs.top_picture import picture

DOCS = Path(__file__).resolve().parents[2] / "docs"


def words(svg: str) -> list[str]:
    """The text of a picture; its layout is up to the version of rich."""
    body = re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", " ", body)).split()


def test_the_picture_is_up_to_date_and_loads_nothing() -> None:
    shown = (DOCS / "top.svg").read_text()
    assert words(shown) == words(picture())
    assert "url(https" not in shown
    assert "](top.svg)" in (DOCS / "stuck.md").read_text()
