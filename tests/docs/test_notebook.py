"""docs/tutorial.ipynb: as docs/tutorial.md has it, and every cell of code runs in an empty folder."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from docs.notebook import NOTEBOOK, PAGE, SHOWN, notebook
from forked_shell import ForkedShell


def test_it_is_what_its_command_makes_of_the_page() -> None:
    assert NOTEBOOK.read_text() == notebook(PAGE.read_text()), "run: python tests/docs/notebook.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_cell_runs_and_the_timeline_of_a_step_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("single", None)  # of another test
    shell, names, shown, losses = ForkedShell(), dict[str, Any](), "", []
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        head, _, rest = "".join(cell["source"]).partition("\n")
        match head.split():
            case ["%%writefile", name]:
                (tmp_path / name).write_text(rest)
            case ["%run", name]:
                names |= runpy.run_path(name, run_name="__main__")
            case [first, *_] if first.startswith("!"):
                losses.append(shell.printed(head.removeprefix("!"), tmp_path))
            case _:
                assert head == SHOWN
                shown = names["result"].trace._repr_html_()
    sys.modules.pop("single", None)
    assert shown.startswith("<svg ")
    assert shown.count("<title>F") == 32
    assert len(losses) == 2
    assert losses[0].splitlines()[0] == losses[1].splitlines()[0].partition(", held")[0]
