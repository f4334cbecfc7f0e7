"""docs/how-to/lightning.md: four stages log what the plain module does, and their checkpoint is the whole model's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from forked_shell import ForkedShell
from installed import ROOT
from long_site import long_site
from torch import nn

from rrfp import checkpoint

__all__ = ["long_site"]

PAGE_PATH = ROOT / "docs" / "how-to" / "lightning.md"
PAGE = PAGE_PATH.read_text()
FILES = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))
COMMANDS = re.findall(r"^    \$ (.+)$", PAGE, re.MULTILINE)


def losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if "loss" in line]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_four_stages_log_what_the_plain_module_does(long_site: Path, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    shell = ForkedShell(long_site)
    plain, ranks = (losses(shell.printed(command, tmp_path, timeout_s=200)) for command in COMMANDS)
    assert [line.split(":")[0] for line in plain[:6]] == [f"step {step}" for step in range(1, 7)]
    assert ranks == plain
    assert re.findall(r"^    (step .+)$", PAGE, re.MULTILINE) == [plain[0], ranks[0]]

    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    assert checkpoint.load(tmp_path / "runs", model) is not None
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))[192:]
    loss = nn.functional.mse_loss(model(inputs), inputs.flip(1).tanh())
    assert f"validation loss {loss.item():.5f}" == plain[6]


def test_every_link_leads_to_a_page() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", PAGE):
        assert (PAGE_PATH.parent / target).exists(), target
