"""docs/graphs.md: every program and command on it, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked_shell import ForkedShell
from installed import ROOT, Installed

PAGE = (ROOT / "docs" / "graphs.md").read_text()
FILES: dict[str, str] = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))
#: Each command, and the lines that the page shows below it.
COMMANDS = re.findall(r"^    \$ (.+)\n((?:    .+\n)+)", PAGE, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_each_command_prints_what_the_page_shows(shell: ForkedShell | Installed, tmp_path: Path) -> None:
    assert len(FILES) == PAGE.count("```python") == 6
    assert [command.split()[-1] for command, _ in COMMANDS] == [name for name in FILES if name != "model.py"]
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for command, shown in COMMANDS:
        printed = shell.printed(command, tmp_path).splitlines()
        assert printed == [line.removeprefix("    ") for line in shown.splitlines()], command


def test_the_simulator_runs_the_pages_command(shell: ForkedShell | Installed, tmp_path: Path) -> None:
    (command,) = re.findall(r"^    (rrfp .+)$", PAGE, re.MULTILINE)
    assert "8 stages, a graph of 8 virtual stages" in shell.printed(command, tmp_path)


def test_every_link_leads_to_a_page() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
