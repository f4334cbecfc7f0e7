"""`rrfp report`: bad usage, and what the page's data has of a trace."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from cli.shell import rrfp

from rrfp.costs import make_costs
from rrfp.lab.report import library
from rrfp.lab.simulation import simulate
from rrfp.trace.chrome import write_chrome


@pytest.fixture(autouse=True)
def _library() -> None:
    if not library.PACKAGE.exists():
        pytest.skip(f"{library.NAME} {library.VERSION}, which make setup fetches with npm, is not here")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three short steps."""
    table = make_costs("llm", 2, 4)
    steps = [simulate(table, hint="bf", limit="n").result.trace(number) for number in range(3)]
    write_chrome(tmp_path / "trace.json", steps, name="short")
    return tmp_path / "trace.json"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--run", "other"), "run is 'other', must be one of: short"),
        (("--steps", "0"), "--steps is 0, must be a whole number >= 1"),
        (("{trace}", "{trace}"), "TRACE is given 3 times, must be given once, or twice to compare"),
        (("-o", "{trace}"), "is read by this command, must be another file to be written"),
        (("-o", "nowhere/page.html"), "nowhere/page.html: cannot be written"),
    ],
)
def test_bad_usage_is_one_line(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    result = rrfp("report", trace, *(argument.format(trace=trace) for argument in arguments))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr


def shown_run(page: Path) -> dict[str, Any]:
    """What the page has of its first run."""
    packed = page.read_text(encoding="utf-8").partition('<script id="data" type="text/plain">')[2].partition("<")[0]
    runs: list[dict[str, Any]] = json.loads(gzip.decompress(base64.b64decode(packed)))["runs"]
    return runs[0]


def test_where_advice_is_refused_the_page_has_its_sentence(trace: Path, tmp_path: Path) -> None:
    result = rrfp("report", trace, "-o", tmp_path / "page.html", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "written": str(tmp_path / "page.html"),
        "bytes": (tmp_path / "page.html").stat().st_size,
    }
    refused = rrfp("advise", trace).stderr.removeprefix("rrfp: ").strip()
    assert shown_run(tmp_path / "page.html")["advice"] == {"refusal": refused}


def test_the_newest_steps_are_shown(trace: Path, tmp_path: Path) -> None:
    assert rrfp("report", trace, "-o", tmp_path / "page.html", "--steps", "2").exit_code == 0
    run = shown_run(tmp_path / "page.html")
    assert (run["recorded"], [step["number"] for step in run["steps"]]) == (3, [1, 2])


def test_the_page_is_the_same_for_the_same_trace(trace: Path, tmp_path: Path) -> None:
    pages = [tmp_path / "one.html", tmp_path / "other.html"]
    for page in pages:
        assert rrfp("report", trace, "-o", page).exit_code == 0
    assert pages[0].read_bytes() == pages[1].read_bytes()
