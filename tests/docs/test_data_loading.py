"""docs/how-to/uneven-microbatches.md, loading: all ways train on the same tokens, and print what the page shows."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from forked_shell import ForkedShell
from installed import ROOT, Installed

PAGE_PATH = ROOT / "docs" / "how-to" / "uneven-microbatches.md"
PAGE = PAGE_PATH.read_text()
FILES = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))
COMMANDS = [each for each in re.findall(r"^    \$ (.+)$", PAGE, re.MULTILINE) if each.endswith(".py")]


@pytest.mark.timeout(150)  # the first one with the wheel builds it
def test_each_program_prints_the_same_losses_and_the_page_shows_them(
    shell: ForkedShell | Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert [command.split()[-1] for command in COMMANDS] == list(FILES)[1:]
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "data", raising=False)
    with torch.random.fork_rng(devices=[]):
        runpy.run_path("local.py", run_name="__main__")
    local = capfd.readouterr().out.splitlines()
    ranks, stages = (shell.printed(COMMANDS[each], tmp_path).splitlines() for each in (1, 3))
    assert ranks == local
    assert len(local) == 4
    assert [line.split("loss")[1] for line in stages] == [line.split("loss")[1] for line in local]
    assert re.findall(r"^    (\d+ microbatches .+)$", PAGE, re.MULTILINE) == [local[0], local[0], stages[0]]


def test_every_link_leads_to_a_page() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", PAGE):
        assert (PAGE_PATH.parent / target).exists(), target
