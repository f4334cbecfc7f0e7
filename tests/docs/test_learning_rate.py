"""docs/how-to/training-loop.md, learning rate: all its programs print the same, one of them in two runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_shell import ForkedShell
from installed import ROOT, Installed
from torch import nn
from torch.optim import lr_scheduler

from rrfp import checkpoint

PAGE_PATH = ROOT / "docs" / "how-to" / "training-loop.md"
PAGE = PAGE_PATH.read_text()
FILES = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))
COMMANDS = re.findall(r"^    \$ (.+)$", PAGE, re.MULTILINE)


@pytest.mark.timeout(150)  # the first one with the wheel builds it
def test_the_pipeline_prints_what_the_loop_without_one_does(shell: ForkedShell | Installed, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    plain, ranks, first, second = (shell.printed(command, tmp_path).splitlines() for command in COMMANDS)
    assert len(plain) == 6
    assert ranks == plain
    assert first + second == plain
    assert re.findall(r"^    (update .+)$", PAGE, re.MULTILINE) == [plain[0], ranks[0], first[0], second[0]]


@pytest.mark.parametrize(
    ("schedule", "arguments"),
    [
        (lr_scheduler.CosineAnnealingWarmRestarts, {"T_0": 2}),
        (lr_scheduler.OneCycleLR, {"max_lr": 1.0, "total_steps": 9}),
        (lr_scheduler.ReduceLROnPlateau, {}),
        (lr_scheduler.SequentialLR, None),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_a_checkpoint_keeps_the_state_of_a_schedule(schedule: Any, arguments: Any, tmp_path: Path) -> None:
    def build() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        if arguments is not None:
            return optimizer, schedule(optimizer, **arguments)
        parts = [lr_scheduler.ConstantLR(optimizer, 0.5), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return optimizer, schedule(optimizer, parts, milestones=[2])

    model = nn.Linear(2, 2)
    _, saved = build()
    for _ in range(3):
        saved.step(*([1.0] if schedule is lr_scheduler.ReduceLROnPlateau else []))
    checkpoint.save(tmp_path / "runs", model, step=3, extra={"schedule": saved.state_dict()})
    loaded = checkpoint.load(tmp_path / "runs", model)
    assert loaded is not None
    _, resumed = build()
    resumed.load_state_dict(loaded.extra["schedule"])
    assert resumed.last_epoch == saved.last_epoch == 3
    assert resumed.get_last_lr() == saved.get_last_lr()


def test_every_link_leads_to_a_page() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", PAGE):
        assert (PAGE_PATH.parent / target).exists(), target
