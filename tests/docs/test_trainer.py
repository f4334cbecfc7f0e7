"""docs/how-to/trainer.md, transformers' Trainer: its programs log the same; the page has that, and what is refused."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from forked_shell import ForkedShell
from installed import ROOT, Installed
from integrations.decoders import loaded, show_no_progress

PAGE_PATH = ROOT / "docs" / "how-to" / "trainer.md"
WHOLE = PAGE_PATH.read_text()
PAGE = WHOLE.split("\n## transformers' Trainer\n")[1].split("\n## ")[0]
FILES = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))
COMMANDS = re.findall(r"^    \$ (.+)$", PAGE, re.MULTILINE)


def logged(output: str) -> list[str]:
    """Losses, norms and learning rates, as the Trainer prints them."""
    return re.findall(r"'((?:loss|eval_loss|grad_norm|learning_rate)': '[^']+)'", output)


def written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)


def printed(name: str, capfd: pytest.CaptureFixture[str]) -> list[str]:
    show_no_progress()
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(name, run_name="__main__")
    return logged(capfd.readouterr().out)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_one_process_logs_and_saves_what_the_plain_script_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, monkeypatch)
    wanted = printed("plain.py", capfd)
    model = loaded(tmp_path / "trained").state_dict()
    assert len(wanted) == 2 * 3 + 2
    assert set(logged(PAGE)) == {wanted[0]}
    assert printed("train.py", capfd) == wanted
    for name, value in loaded(tmp_path / "trained").state_dict().items():
        torch.testing.assert_close(value, model[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_four_processes_log_what_the_plain_script_does(
    shell: ForkedShell | Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, monkeypatch)
    assert logged(shell.printed(COMMANDS[2], tmp_path, timeout_s=200)) == printed("plain.py", capfd)


def test_the_page_lists_what_is_refused() -> None:
    from rrfp.integrations.transformers import REFUSED

    table = PAGE.split("### What it refuses")[1]
    rows = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)]
    assert rows == [*map(list, REFUSED.values()), ["save_only_model", "load_best_model_at_end"]]


def test_every_link_leads_to_a_page() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", WHOLE):
        assert (PAGE_PATH.parent / target).exists(), target
