"""docs/how-to/metrics.md: its program writes what the page says, its tables are complete, its picture is up to date."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from callbacks.steps import ended
from installed import ROOT

from docs import progress_picture
from rrfp.callbacks import Callback, metrics

PAGE_PATH = ROOT / "docs" / "how-to" / "metrics.md"
PAGE = PAGE_PATH.read_text()
(PROGRAM,) = re.findall(r'```python title="train.py"\n(.*?)```', PAGE, re.DOTALL)


def test_the_program_writes_a_row_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        exec(compile(PROGRAM, "train.py", "exec"), {})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(6))
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_every_figure_and_every_method_is_in_the_tables() -> None:
    section = PAGE.split("## The figures")[1].split("##")[0]
    listed = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)))
    assert sorted(listed) == sorted({name.partition("/")[0] for name in metrics(ended())})
    methods = [name for name, _ in inspect.getmembers(Callback, inspect.isfunction)]
    assert sorted(re.findall(r"`(\w+)\(\w+\)`", PAGE.split("## Write your own")[1].split("All but")[0])) == methods


@pytest.mark.allow_blocking(reason="in virtual time nothing else happens while callbacks are waited for")
def test_the_picture_is_that_of_the_code() -> None:
    assert progress_picture.PICTURE.read_text(encoding="utf-8") == progress_picture.picture()


def test_every_link_leads_to_a_page() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", PAGE):
        assert (PAGE_PATH.parent / target).exists(), target
