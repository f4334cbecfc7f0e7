"""docs/how-to/torch-pipelining.md: its script runs, and with its two changed lines the losses are the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fork_server import printed
from installed import ROOT

PAGE = (ROOT / "docs" / "how-to" / "torch-pipelining.md").read_text().split("\n## torchtitan\n")[0]
PROGRAM: str
((_, PROGRAM),) = re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL)
(DIFF,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)


def changed() -> str:
    """The program with the lines of the diff exchanged."""
    program = PROGRAM
    for part in DIFF.split("...\n"):
        old, new = ("".join(f"{line[1:]}\n" for line in part.splitlines() if line[0] == mark) for mark in "-+")
        assert program.count(old) == 1
        program = program.replace(old, new)
    return program


@pytest.mark.slow
def test_the_changed_script_prints_the_losses_of_the_stock_one(tmp_path: Path) -> None:
    outputs = []
    for name, program in (("stock", PROGRAM), ("changed", changed())):
        script = tmp_path / f"{name}.py"
        script.write_text(program)
        outputs.append(printed(script, ranks=2, timeout_s=25))
    stock, own = outputs
    assert len(stock.splitlines()) == 5
    assert own == stock
