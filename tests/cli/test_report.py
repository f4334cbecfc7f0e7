"""`rrfp report`: bad usage, and what the page's data has of a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.shell import rrfp

from rrfp.costs import make_costs
from rrfp.lab.report import data, library
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


def test_where_advice_is_refused_the_page_has_its_sentence(trace: Path, tmp_path: Path) -> None:
    result = rrfp("report", trace, "-o", tmp_path / "page.html", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "written": str(tmp_path / "page.html"),
        "bytes": (tmp_path / "page.html").stat().st_size,
    }
    refused = rrfp("advise", trace).stderr.removeprefix("rrfp: ").strip()
    assert data.report_data([str(trace)])["runs"][0]["advice"] == {"refusal": refused}


def test_the_newest_steps_are_shown(trace: Path) -> None:
    run = data.report_data([str(trace)], data.ReportOptions(steps=2))["runs"][0]
    assert (run["recorded"], [step["number"] for step in run["steps"]]) == (3, [1, 2])


def test_the_page_is_the_same_for_the_same_trace(trace: Path, tmp_path: Path) -> None:
    pages = [tmp_path / "one.html", tmp_path / "other.html"]
    for page in pages:
        assert rrfp("report", trace, "-o", page).exit_code == 0
    assert pages[0].read_bytes() == pages[1].read_bytes()
