"""docs/how-to/from-my-job-to-the-simulator.md: its file, and its commands one after the other, with the built wheel."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from installed import ROOT, Installed

PAGE_PATH = ROOT / "docs" / "how-to" / "from-my-job-to-the-simulator.md"
PAGE = PAGE_PATH.read_text()
FILES = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))
COMMANDS = re.findall(r"^    \$ (.+)$", PAGE, re.MULTILINE)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_whole_way(installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert [command.split()[0] for command in COMMANDS] == ["torchrun", "rrfp", "rrfp", "rrfp", "rrfp"]
    train, trace, costs, simulate, sweep = (installed.printed(command, tmp_path) for command in COMMANDS)
    assert train.startswith("the last step took ")
    assert "8 steps" in trace
    assert "6 training step(s) of 6 microbatches" in costs
    assert "left out: 2 at the beginning" in costs
    assert simulate.startswith("slot-aware-pyramid: 2 stages, 6 microbatches")
    for method in ("slot-aware-pyramid, limit 1f1b", "bf, limit n", "bf, limit 2n", "1f1b (strict)"):
        assert method in sweep
    table = json.loads((tmp_path / "costs.json").read_text())
    assert sum(map(sum, table["B"][1:])) > sum(map(sum, table["B"][:1])), "the second stage has more layers"


def test_every_link_leads_to_a_page() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", PAGE):
        assert (PAGE_PATH.parent / target).exists(), target
