"""docs/how-to/several-hosts.md, Ray Train: four workers, one of which is killed, end with the bits of a whole run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from installed import ROOT
from long_site import long_site
from torch import nn

import rrfp
from rrfp import checkpoint

__all__ = ["long_site"]

PAGE = (ROOT / "docs" / "how-to" / "several-hosts.md").read_text().split("\n## Ray Train\n")[1]
((NAME, PROGRAM),) = re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL)

REPORT = '            ray.train.report({"step": step, "loss": loss})\n'
KILL = """            if loaded is None and step == 3 and topology.rank == 2:
                import os

                os.kill(os.getpid(), 9)
"""


def build_layer(number: int) -> nn.Module:
    """As on the page."""
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_killed_worker_is_started_again_and_no_bit_changes(long_site: Path, tmp_path: Path) -> None:
    assert PROGRAM.count(REPORT) == 1
    (tmp_path / NAME).write_text(PROGRAM.replace(REPORT, KILL + REPORT))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(long_site), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, NAME], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=450, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-9000:]}\n{done.stderr[-9000:]}"
    said = done.stdout + done.stderr
    assert "begins after step 0" in said
    assert "begins after step 4" in said

    with torch.random.fork_rng(devices=[]):
        alone, resumed = ([build_layer(number) for number in range(4)] for _ in range(2))
        optimizer = torch.optim.AdamW([value for layer in alone for value in layer.parameters()], lr=1e-2)
        with rrfp.local(alone, loss_fn=nn.functional.mse_loss, deterministic=True).blocking() as pipe:
            for step in range(6):
                data = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
                pipe.step(data, data.tanh(), microbatches=8)
                optimizer.step()
                optimizer.zero_grad()
    loaded = checkpoint.load(tmp_path / "runs", nn.Sequential(*resumed))
    assert loaded is not None
    assert loaded.step == 6
    for layer, other in zip(alone, resumed, strict=True):
        for name, value in layer.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
