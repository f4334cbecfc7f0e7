"""torchrun on two hosts, a replica on each: the loss of a rank takes its host's ranks, and the other host goes on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from runtime.toys import TOLERANCE
from under_torchrun import TESTS

from rrfp import checkpoint


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_other_host_finishes_the_step_and_saves(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    meeting = ["--rdzv-backend", "c10d", "--rdzv-id", "lost-host", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *meeting,
             "--max-restarts", "0", "--rdzv-conf", f"is_host={int(host == 0)}",
             str(TESTS / "runtime/torchrun_lost_host.py"), str(tmp_path / "saved")],
            env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for host in range(2)
    ]  # fmt: skip
    try:
        said = [agent.communicate(timeout=150) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    (out, errors), (_, lost) = said
    lines = sorted(map(json.loads, filter(None, out.splitlines())), key=lambda line: int(line["rank"]))
    assert [line["rank"] for line in lines] == [0, 1], errors
    for line in lines:
        assert line["lost"] == [2, 3]
        assert line["gap"] < TOLERANCE
    assert "the others have finished it without" in errors
    assert "Signal 9 (SIGKILL)" in lost
    newest = checkpoint.latest(tmp_path / "saved")
    assert str(newest) == lines[0]["path"]
