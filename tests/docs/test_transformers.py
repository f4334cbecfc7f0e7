"""docs/how-to/transformers.md: its files, one after the other; those for one process in this one."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from forked_shell import ForkedShell
from installed import ROOT, Installed
from integrations.decoders import loaded, show_no_progress

PAGE_PATH = ROOT / "docs" / "how-to" / "transformers.md"
WHOLE = PAGE_PATH.read_text()
PAGE = WHOLE.split("\n## From the Hub and to the Hub\n")[0]
FILES = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))
COMMANDS = re.findall(r"^    \$ (.+)$", PAGE, re.MULTILINE)
LOSS = re.compile(r"step (\d+): loss ([\d.]+)")


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_each_program_prints_the_same_losses_and_the_page_shows_them(
    shell: ForkedShell | Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert [command.split()[-1] for command in COMMANDS] == list(FILES)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    show_no_progress()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def run(name: str) -> list[tuple[str, str]]:
        with torch.random.fork_rng(devices=[]):
            runpy.run_path(name, run_name="__main__")
        return LOSS.findall(capfd.readouterr().out)

    alone, local = run("single.py"), run("local.py")
    several = LOSS.findall(shell.printed(COMMANDS[2], tmp_path))
    assert alone == local == several
    assert len(alone) == 5
    assert float(alone[-1][1]) < float(alone[0][1])
    assert set(LOSS.findall(PAGE)) == {alone[0]}
    run("merge.py")
    model, inputs = loaded(tmp_path / "trained"), {"input_ids": torch.arange(8)[None]}
    assert model(**inputs, labels=inputs["input_ids"]).loss.item() < float(alone[0][1])


def test_every_link_leads_to_a_page() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", WHOLE):
        assert (PAGE_PATH.parent / target).exists(), target
