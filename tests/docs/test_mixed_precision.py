"""docs/how-to/training-loop.md, mixed precision: its programs learn, and the scaler finds a scale."""

from __future__ import annotations

import re

import pytest
import torch
from installed import ROOT

PAGE = (ROOT / "docs" / "how-to" / "training-loop.md").read_text()
PROGRAMS: dict[str, str] = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))


def run(name: str, capsys: pytest.CaptureFixture[str], scaler: str = "init_scale=2.0**45") -> tuple[list[float], float]:
    """The losses that a program prints, and the last scale; ``scaler`` replaces the arguments of the page's scaler."""
    program = PROGRAMS[name].replace("init_scale=2.0**45", scaler)
    with torch.random.fork_rng(devices=[]):
        exec(compile(program, name, "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    scales = re.findall(r"scale (\S+)$", lines[-1])
    return [float(re.findall(r"loss ([^\s,]+)", line)[0]) for line in lines], float(scales[0]) if scales else 0.0


def test_bfloat16_learns(capsys: pytest.CaptureFixture[str]) -> None:
    losses, _ = run("bfloat16.py", capsys)
    assert losses[-1] < 0.5 * losses[0]


def test_float16_skips_overflows_until_the_scale_fits_and_then_learns(capsys: pytest.CaptureFixture[str]) -> None:
    losses, scale = run("float16.py", capsys)
    assert losses[-1] < 0.9 * losses[0]
    assert 2.0**20 < scale < 2.0**45


def test_without_a_scaler_float16_learns_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    losses, _ = run("float16.py", capsys, "enabled=False")
    assert losses[-1] > 0.99 * losses[0]
