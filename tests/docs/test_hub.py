"""docs/how-to/transformers.md, from the Hub and to the Hub: its files, one after the other."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from forked_shell import ForkedShell
from installed import ROOT, Installed
from integrations.decoders import loaded, show_no_progress

PAGE = (ROOT / "docs" / "how-to" / "transformers.md").read_text().split("\n## From the Hub and to the Hub\n")[1]
FILES = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))
COMMANDS = re.findall(r"^    \$ (.+)$", PAGE, re.MULTILINE)
LOSS = re.compile(r"\bloss ([\d.]+)")


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_folder_is_trained_and_saved_by_the_page_alone(
    shell: ForkedShell | Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert [command.split()[-1] for command in COMMANDS] == list(FILES)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    show_no_progress()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def run(name: str) -> list[str]:
        with torch.random.fork_rng(devices=[]):
            runpy.run_path(name, run_name="__main__")
        return LOSS.findall(capfd.readouterr().out)

    run("make.py")
    losses = LOSS.findall(shell.printed(COMMANDS[1], tmp_path))
    assert len(losses) == 5
    assert float(losses[-1]) < float(losses[0])
    assert LOSS.findall(PAGE) == [losses[0], *run("check.py")]
    run("convert.py")
    del sys.modules["train"]  # which it imports
    assert len(list((tmp_path / "converted").glob("*.safetensors"))) > 1
    trained, converted = loaded(tmp_path / "trained").state_dict(), loaded(tmp_path / "converted").state_dict()
    assert all(torch.equal(each, converted[name]) for name, each in trained.items())
