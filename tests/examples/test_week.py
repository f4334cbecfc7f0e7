"""A week's run in minutes: ranks are killed from outside, the job is stopped, and goes on in another layout."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from examples.test_killed_run import digests
from examples.test_train_gpt import SCRIPT, SMALL, start
from fork_server import fork_server, printed

__all__ = ["fork_server"]

STEPS = 40

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(200)]


def options(folder: Path) -> tuple[str, ...]:
    """As docs/how-to/checkpoint.md has them, and smaller."""
    own = ("--checkpoint", str(folder), "--resume", "--deterministic")
    return (*own, "--save-every", "5", "--steps", str(STEPS), "--evaluate-every", "10", *SMALL)


def results(output: str) -> dict[str, set[str]]:
    """Loss and norm, or held-out loss, as printed in all attempts, by step."""
    by_step: dict[str, set[str]] = {}
    for step, result in re.findall(r"^(step +\d+)  (loss \S+  norm \S+|held-out loss \S+)", output, re.MULTILINE):
        by_step.setdefault(f"{step} {result.split()[0]}", set()).add(result)
    return by_step


def ranks_of(job: subprocess.Popen[str]) -> list[int]:
    """The processes of its ranks, by rank."""
    return sorted(int(each) for each in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split())


def test_a_run_that_is_killed_twice_and_moved_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = printed(SCRIPT, *options(tmp_path / "whole"), ranks=4, timeout_s=100)

    victims, lines = {"10": 3, "20": 0}, []
    with start(4, *options(tmp_path / "week"), launcher=("--max-restarts", "2"), errors=subprocess.STDOUT) as job:
        assert job.stdout is not None
        for line in job.stdout:
            lines.append(line)
            if (match := re.match(r"step +(\d+)  loss", line)) and match[1] in victims:
                os.kill(ranks_of(job)[victims.pop(match[1])], signal.SIGKILL)
            if not victims and line.startswith("step   30  loss"):
                job.terminate()  # as a scheduler that wants the machine does
    output = "".join(lines)
    assert output.count("failed (exitcode: -9)") == 2, output

    elsewhere = ("--chunks", "2", "--placement", "v")
    moved = printed(SCRIPT, *options(tmp_path / "week"), *elsewhere, ranks=2, timeout_s=100)
    resumed = re.findall(r"^resumed after step (\d+) from", output + moved, re.MULTILINE)
    for step, known in zip(map(int, resumed), ((5, 10), (15, 20), (25, 30)), strict=True):
        assert step in known, "a save that began at the kill may be complete, or not"
    assert results(output + moved) == results(whole)
    assert digests(tmp_path / "week", STEPS) == digests(tmp_path / "whole", STEPS)
