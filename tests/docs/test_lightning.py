"""docs/how-to/trainer.md, Lightning: four stages log what the plain module does; a killed run goes on to its bits."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import fork_server
import pytest
import torch
from forked_shell import ForkedShell
from installed import ROOT
from long_site import long_site
from torch import Tensor, nn

from rrfp import checkpoint

__all__ = ["long_site"]

PAGE = (ROOT / "docs" / "how-to" / "trainer.md").read_text().split("\n## Lightning\n")[1].split("\n## ")[0]
FILES = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))
COMMANDS = re.findall(r"^    \$ (.+)$", PAGE, re.MULTILINE)


def losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if "loss" in line]


#: In the second epoch, before the optimizer steps.
KILL = """        if self.trainer.global_step == 8 and topology.rank == 2:
            import os

            os.kill(os.getpid(), 9)
"""
CLIP = "        self.pipe.clip_grad_norm_(0.1)\n"


def bits(folder: Path) -> list[tuple[Tensor, dict[str, Any]]]:
    """Each parameter of the newest checkpoint with its state in the optimizer."""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    loaded = checkpoint.load(folder, model, optimizer)
    assert loaded is not None
    assert loaded.step == 12
    return [(each.detach(), optimizer.state[each]) for each in model.parameters()]


@pytest.mark.long
@pytest.mark.timeout(500)
def test_four_stages_log_what_the_plain_module_does_and_a_killed_run_goes_on_to_the_same_bits(
    long_site: Path, tmp_path: Path
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    shell = ForkedShell(long_site)
    plain, ranks = (losses(shell.printed(command, tmp_path, timeout_s=200)) for command in COMMANDS)
    assert [line.split(":")[0] for line in plain if line.startswith("step")] == [
        f"step {step}" for step in range(1, 13)
    ]
    assert ranks == plain
    assert re.findall(r"^    (step .+)$", PAGE, re.MULTILINE) == [plain[0], ranks[0]]

    alone = bits((tmp_path / "runs").rename(tmp_path / "alone"))
    assert FILES["train.py"].count(CLIP) == 1
    (tmp_path / "killed.py").write_text(FILES["train.py"].replace(CLIP, KILL + CLIP))
    paths = os.pathsep.join([str(long_site), os.environ.get("PYTHONPATH", "")])
    killed = fork_server.run("killed.py", cwd=tmp_path, ranks=4, timeout_s=200, variables={"PYTHONPATH": paths})
    assert killed[2].code == -9, killed
    assert all(each.code != 0 for each in killed)
    resumed = losses(shell.printed(COMMANDS[1], tmp_path, timeout_s=200))
    assert resumed == plain[7:]
    for (value, state), (other, other_state) in zip(bits(tmp_path / "runs"), alone, strict=True):
        assert torch.equal(value, other)
        assert all(torch.equal(state[name], other_state[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
