"""Runs scripts of the tests under torchrun, as users do: real rendezvous, ordinary interpreters that start and end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


def run(
    script: str, *arguments: str, ranks: int, timeout_s: float, look_every_s: float = 0.1
) -> subprocess.CompletedProcess[str]:
    """Run ``script``, a path in the folder of tests, on so many ranks of one thread each.

    The launcher looks for ranks that have ended as often as ``look_every_s`` says, and then ends the others.
    """
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--monitor-interval", str(look_every_s)]
    return subprocess.run(
        [*command, str(TESTS / script), *arguments],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def reports(script: str, *arguments: str, ranks: int, timeout_s: float) -> list[dict[str, Any]]:
    """Run a script that must succeed, and of which each rank prints one line of JSON; the lines by rank."""
    done = run(script, *arguments, ranks=ranks, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    lines = sorted(map(json.loads, done.stdout.splitlines()), key=lambda line: int(line["rank"]))
    assert [line["rank"] for line in lines] == list(range(ranks))
    return lines
