"""The how-to pages for plugins: every file and command in them, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked_shell import ForkedShell
from installed import ROOT, Installed

FOLDER = ROOT / "docs" / "how-to"
PAGES = ("write-a-hint.md", "write-a-transport.md", "write-a-stage-program.md")


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("page", PAGES)
def test_each_command_prints_what_the_page_shows(page: str, shell: ForkedShell | Installed, tmp_path: Path) -> None:
    text = (FOLDER / page).read_text()
    files = re.findall(r'```python title="([^"]+)"\n(.*?)```', text, re.DOTALL)
    commands = re.findall(r"^    \$ (.+)\n    (.+)$", text, re.MULTILINE)
    assert files
    assert commands
    for name, source in files:
        (tmp_path / name).write_text(source)
    for command, shown in commands:
        printed = shell.printed(command, tmp_path).splitlines()
        assert shown == "..." or shown in (printed[0], printed[-1])


@pytest.mark.parametrize("page", [*PAGES, "../plugins.md"])
def test_every_link_leads_to_a_page(page: str) -> None:
    path = FOLDER / page
    for target in re.findall(r"\]\((?!http)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target
