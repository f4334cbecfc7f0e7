"""The training example under torchrun: pipelines alone and with the other dims, several jobs, restarts, wrong sizes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from batches import long
from fork_server import fork_server, printed

__all__ = ["fork_server"]

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SMALL = ("--microbatches", "2", "--microbatch-size", "1")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


def start(
    ranks: int,
    *arguments: str,
    script: Path = SCRIPT,
    launcher: tuple[str, ...] = (),
    errors: int = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """A job of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *launcher]
    return subprocess.Popen(
        [*command, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def end(job: subprocess.Popen[str]) -> str:
    """What a job that must succeed prints."""
    output, errors = job.communicate(timeout=80)
    assert job.returncode == 0, errors
    return output


def steps(output: str) -> list[tuple[int, float]]:
    """Number and loss of each step that was printed."""
    return [(int(step), float(loss)) for step, loss in re.findall(r"^step +(\d+)  loss (\S+)", output, re.MULTILINE)]


@pytest.mark.parametrize(("stages", "amp"), [(2, "fp16"), long(2, "bf16"), long(4, "off")])
def test_a_pipeline_trains_and_evaluates(stages: int, amp: str) -> None:
    arguments = ("--steps", "3", "--microbatches", "6", "--evaluate-every", "3", "--amp", amp)
    if amp == "fp16":  # torchrun and its interpreters only where time allows
        output = printed(SCRIPT, *arguments, ranks=stages, timeout_s=80)
    else:
        output = end(start(stages, *arguments))
    numbers, losses = zip(*steps(output), strict=True)
    assert numbers == (1, 2, 3)
    assert losses[-1] < losses[0]
    assert "held-out loss" in output
    assert len(SCRIPT.read_text().splitlines()) < 215


@pytest.mark.long
def test_pipeline_tensor_and_data_parallelism_train_together() -> None:
    output = end(start(8, "--pp", "2", "--tp", "2", "--dp", "2", "--steps", "3", *SMALL))
    numbers, losses = zip(*steps(output), strict=True)
    assert numbers == (1, 2, 3)
    assert losses[-1] < losses[0]
    assert len(output.splitlines()) == 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--pp", "2", "--tp", "2", "--dp", "2"), "WORLD_SIZE is 2, must be pp 2 x dp 2 x tp 2 = 8"),
        (("--chunks", "4"), "--pp x --chunks is 2 x 4, must be 1..4, with a layer for each"),
    ],
)
def test_a_wrong_number_of_ranks_or_chunks_is_one_line_with_the_arithmetic(
    arguments: tuple[str, ...], text: str
) -> None:
    job = start(2, *arguments)
    output, errors = job.communicate(timeout=80)
    assert job.returncode != 0
    assert output == ""
    told = [line for line in errors.splitlines() if line.startswith("train_gpt.py: ")]
    assert told == [f"train_gpt.py: {text}"]
    assert "exitcode  : 2 " in errors


@pytest.mark.long
def test_two_jobs_on_one_host_and_a_restarted_one_and_its_first_attempt_do_not_meet() -> None:
    failing = Path(__file__).parent / "fails_once.py"
    restarted = start(2, "--steps", "2", *SMALL, script=failing, launcher=("--max-restarts", "1"))
    plain = start(2, "--steps", "2", *SMALL)
    first, *again = steps(end(restarted))
    assert [number for number, _ in again] == [1, 2]
    assert first == again[0]
    assert again == steps(end(plain))


@pytest.mark.long
def test_a_run_goes_on_with_more_replicas(tmp_path: Path) -> None:
    """The checkpoint has no state of the sampler for the second one."""
    own = ("--checkpoint", str(tmp_path), "--resume", "--save-every", "0", *SMALL)
    printed(SCRIPT, *own, "--steps", "2", ranks=1, timeout_s=60)
    output = printed(SCRIPT, *own, "--steps", "3", "--dp", "2", ranks=2, timeout_s=60)
    assert f"resumed after step 2 from {tmp_path}/000001-step-2" in output
    assert [number for number, _ in steps(output)] == [3]
    assert f"step    3  saves to {tmp_path}/000002-step-3" in output
