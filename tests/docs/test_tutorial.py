"""docs/tutorial.md: every file and command in it, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked_shell import ForkedShell
from installed import ROOT, Installed

TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
FILES = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', TUTORIAL, re.DOTALL))
COMMANDS = re.findall(r"^    \$ (.+)\n    (.+)$", TUTORIAL, re.MULTILINE)
LOSS = re.compile(r"step (\d+): loss ([\d.]+)")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_command_prints_the_same_losses_and_what_the_page_shows(
    shell: ForkedShell | Installed, tmp_path: Path
) -> None:
    assert list(FILES) == ["single.py", "local.py", "train.py"]
    assert [command.split()[-1] for command, _ in COMMANDS] == list(FILES)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    outputs = [shell.printed(command, tmp_path) for command, _ in COMMANDS]
    losses = [LOSS.findall(output) for output in outputs]
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0]) == 5
    for output, (_, shown) in zip(outputs, COMMANDS, strict=True):
        assert LOSS.findall(output)[0] == LOSS.findall(shown)[0]


def test_every_link_leads_to_a_page() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", TUTORIAL):
        assert (ROOT / "docs" / target).exists(), target
