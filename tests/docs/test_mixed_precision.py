"""docs/how-to/mixed-precision.md: its program finds a scale, on every rank the same, and learns."""

from __future__ import annotations

import re

import pytest
import torch
from installed import ROOT

PAGE = (ROOT / "docs" / "how-to" / "mixed-precision.md").read_text()
((_, PROGRAM),) = re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL)


def run(program: str, capsys: pytest.CaptureFixture[str]) -> tuple[list[float], int]:
    """The losses that it prints, and its good steps."""
    with torch.random.fork_rng(devices=[]):
        exec(compile(program, "float16.py", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    (good_steps,) = re.findall(r"(\d+) good steps", lines[-1])
    return [float(re.findall(r"loss (\S+),", line)[0]) for line in lines], int(good_steps)


def test_the_program_skips_overflows_until_the_scale_fits_and_then_learns(capsys: pytest.CaptureFixture[str]) -> None:
    losses, good_steps = run(PROGRAM, capsys)
    assert losses[-1] < 0.9 * losses[0]
    assert 10 < good_steps < 40


def test_without_a_scale_it_learns_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    losses, good_steps = run(
        PROGRAM.replace("scale, good_steps, max_norm = 2.0**60", "scale, good_steps, max_norm = 1.0"), capsys
    )
    assert good_steps == 40
    assert losses[-1] > 0.99 * losses[0]
