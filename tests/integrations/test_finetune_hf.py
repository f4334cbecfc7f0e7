"""The example that fine-tunes a model of transformers: in one process, and one stage a process."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from fork_server import fork_server, printed
from integrations.decoders import loaded, show_no_progress

__all__ = ["fork_server"]

SCRIPT = Path(__file__).parents[2] / "examples" / "finetune_hf.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+),", output, re.MULTILINE)]


def run_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> list[float]:
    """The losses of three steps in this process; the model is saved in ``folder``."""
    show_no_progress()
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--steps", "3", "--save", str(folder)])
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return losses(capfd.readouterr().out)


def test_it_learns_and_saves_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first, _, last = run_alone(tmp_path, monkeypatch, capfd)
    assert last < first - 1
    assert loaded(tmp_path).config.model_type == "llama"


@pytest.mark.long
def test_two_processes_learn_what_one_learns_and_save_what_from_pretrained_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The model has a tied head, of which both processes hold a copy."""
    alone = run_alone(tmp_path / "alone", monkeypatch, capfd)
    both = losses(printed(SCRIPT, "--steps", "3", "--save", str(tmp_path / "both"), ranks=2, timeout_s=100))
    assert both == alone
    wanted, model = loaded(tmp_path / "alone").state_dict(), loaded(tmp_path / "both")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


def test_it_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 100
