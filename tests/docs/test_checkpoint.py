"""docs/how-to/checkpoint.md: its program, killed after a step, goes on with the losses that it would have had."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from installed import ROOT

from rrfp.pipeline.faces import BlockingPipeline

PAGE_PATH = ROOT / "docs" / "how-to" / "checkpoint.md"
PAGE = PAGE_PATH.read_text()
((_, PROGRAM),) = re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL)


class KilledError(Exception):
    """The end of the first attempt."""


def run(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that the program prints until it ends or is killed."""
    with torch.random.fork_rng(devices=[]), suppress(KilledError):
        exec(compile(PROGRAM, "train.py", "exec"), {})
    return capsys.readouterr().out.splitlines()


def test_the_program_goes_on_where_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    monkeypatch.chdir(whole)
    expected = run(capsys)
    assert [line.split(":")[0] for line in expected] == [f"step {step}" for step in range(1, 7)]
    assert expected[0] in PAGE
    step, count = BlockingPipeline.step, 0

    def kill(self: BlockingPipeline, *batch: object) -> object:
        nonlocal count
        count += 1
        if count == 4:
            raise KilledError
        return step(self, *batch)  # type: ignore[arg-type]

    monkeypatch.chdir(killed)
    with monkeypatch.context() as patched:
        patched.setattr(BlockingPipeline, "step", kill)
        assert run(capsys) == expected[:3]
    assert run(capsys) == ["resumed after step 2", *expected[2:]]


def test_every_link_leads_to_a_page() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", PAGE):
        assert (PAGE_PATH.parent / target).exists(), target
