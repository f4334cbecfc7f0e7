"""docs/how-to/read-a-trace.md: its program and its commands, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli.shell import rrfp
from forked_shell import ForkedShell

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "read-a-trace.md").read_text()


def test_the_program_writes_the_trace_whose_table_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program,) = re.findall(r'```python title="trace.py"\n(.*?)```', PAGE, re.DOTALL)
    (tmp_path / "trace.py").write_text(program)
    monkeypatch.setenv("COLUMNS", "80")
    shell = ForkedShell()
    shell.printed("python trace.py", tmp_path)
    (shown,) = re.findall(r"\n```\n(trace\.json: .*?)```", PAGE, re.DOTALL)
    printed = shell.printed("rrfp trace trace.json", tmp_path)
    # Times differ from machine to machine: the words that stand for themselves do not.
    assert shape(printed) == shape(shown)
    for head in ("compute", "input", "memory", "nothing left", "other", "blocked", "peak held", "peak MiB"):
        assert f"\n| {head} |" in PAGE
    pictures = re.findall(r"^    rrfp (trace .*--timeline \S+[^#\n]*)", PAGE, re.MULTILINE)
    assert len(pictures) == 3
    monkeypatch.chdir(tmp_path)
    for arguments in pictures:
        assert rrfp(*arguments.split()).exit_code == 0
        assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "step.png").unlink()
    commands = re.findall(r"^    \$ rrfp (.+costs\.json.*)$", PAGE, re.MULTILINE)
    costs, simulate, sweep = (rrfp(*command.split()) for command in commands)
    assert "training step(s) of 8 microbatches" in costs.stdout
    assert simulate.stdout.startswith("slot-aware-pyramid: 3 stages, 8 microbatches")
    for method in ("slot-aware-pyramid, limit 1f1b", "bf, limit n", "bf, limit 2n", "strict 1f1b"):
        assert method in sweep.stdout


def shape(text: str) -> list[str]:
    """The words of each line, with every number alike and without the rule, whose length goes with the numbers."""
    lines = (re.sub(r"[0-9.]+%?", "N", line).split() for line in text.splitlines() if line.strip("\u2500 "))
    return [" ".join(words) for words in lines]
