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

    # Section 4: a line behind the loop, inside the with block, and a command on the file that it writes.
    (line,) = re.findall(r"```python\n +(pipe\.save_trace\(.+\))\n```", TUTORIAL)
    (trace,) = re.findall(r"^`(rrfp trace .+?)` prints", TUTORIAL, re.MULTILINE)
    before, end, after = FILES["train.py"].rpartition("\n\n\nif __name__")
    (tmp_path / "train.py").write_text(f"{before}\n        {line}{end}{after}")
    assert LOSS.findall(shell.printed(COMMANDS[-1][0], tmp_path)) == losses[0]
    table = shell.printed(trace, tmp_path)
    for said in ("stage", "compute", "input", "blocked", "held"):
        assert said in table, table


def test_every_link_leads_to_a_page() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", TUTORIAL):
        assert (ROOT / "docs" / target).exists(), target


@pytest.mark.parametrize(
    "word", ["DataLoader", "learning-rate scheduler", "gradient accumulation", "WandB", "mixed precision"]
)
def test_the_site_has_what_users_of_torch_search_for(word: str) -> None:
    """At the beginning of a word: the search finds no other place."""
    pages = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    assert any(re.search(rf"(?<![\w.]){word}", page, re.IGNORECASE) for page in pages)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/install.md"])
def test_the_tested_version_of_torch_is_that_of_the_lock(page: str) -> None:
    (locked,) = re.findall(r"^torch==(.+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    said = set(re.findall(r"\btorch (\d+\.\d+\.\d+)", (ROOT / page).read_text()))
    assert said == {locked}
