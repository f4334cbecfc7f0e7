"""`rrfp check faults`: one run in detail, many in a summary, and the command that replays a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.shell import rrfp, rrfp_process

from rrfp.testing.faults import REQUIRED, Ending

#: Waits for a task that is never ready on the last stage, so a pipeline of two stages never ends.
SLEEPY = """
from rrfp import Hint

class Sleepy(Hint):
    may_wait = True

    def choose(self, ready, view):
        return None if view.stage else next(iter(ready))
"""

#: Of two stages, with a message that comes twice. What hint a seed picks depends on those that are registered.
DOUBLED = ("check", "faults", "--seed", "27", "--hint", "bf")


@pytest.fixture
def sleepy(tmp_path: Path) -> str:
    path = tmp_path / "sleepy.py"
    path.write_text(SLEEPY)
    return f"{path}:Sleepy"


def test_one_run_tells_its_pipeline_its_faults_and_its_ending() -> None:
    result = rrfp(*DOUBLED)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "seed 27"
    assert [line.split(":")[0] for line in lines[1:5]] == ["pipeline", "schedule", "steps", "fault"]
    assert "ending: refused" in lines
    assert "ProtocolError" in lines[-1]


def test_the_trace_tells_everything_that_happens() -> None:
    lines = rrfp(*DOUBLED, "--trace").stdout.splitlines()
    assert [line for line in lines if "stage 0 starts F0@0" in line]
    assert [line for line in lines if "refuses" in line]
    assert len(lines) > len(rrfp(*DOUBLED).stdout.splitlines()) + 10


def test_one_run_as_json() -> None:
    answer = json.loads(rrfp(*DOUBLED, "--json").stdout)
    assert list(answer) == ["seed", "scenario", "ending", "text", "ok", "problems"]
    assert (answer["seed"], answer["ending"], answer["ok"], answer["problems"]) == (27, "refused", True, [])
    traced = json.loads(rrfp(*DOUBLED, "--json", "--trace").stdout)
    assert traced.pop("trace")
    assert traced == answer


def test_many_runs_are_summarised_by_fault_and_ending() -> None:
    result = rrfp("check", "faults", "--runs", "200", "--seed", "7")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "200 runs from seed 7 on, 0 failed" in result.stdout
    answer = json.loads(rrfp("check", "faults", "--runs", "200", "--seed", "7", "--json").stdout)
    assert list(answer) == ["first", "runs", "ok", "endings", "failed"]
    assert (answer["first"], answer["runs"], answer["ok"], answer["failed"]) == (7, 200, True, [])
    assert sum(sum(endings.values()) for endings in answer["endings"].values()) == 200
    assert set(answer["endings"]) <= {*REQUIRED, "none", "several"}
    assert {ending for endings in answer["endings"].values() for ending in endings} <= {*Ending}


def test_the_same_seeds_give_the_same_bytes_in_any_process() -> None:
    command = ("check", "faults", "--seed", "3", "--trace")
    first, second = rrfp_process(*command, hash_seed=1), rrfp_process(*command, hash_seed=2)
    assert first.returncode == 0
    assert first.stdout == second.stdout


def test_a_failure_is_one_line_with_the_command_that_replays_it(sleepy: str) -> None:
    result = rrfp("check", "faults", "--runs", "20", "--hint", sleepy)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("rrfp: seed ")
    command = line.partition("replay it with: rrfp ")[2].split()
    assert command[:3] == ["check", "faults", "--seed"]
    assert command[4:] == ["--hint", sleepy, "--trace"]
    again = rrfp(*command)
    assert again.exit_code == 1
    assert again.stderr == result.stderr
    assert "ending: stalled" in again.stdout


def test_failures_in_json_name_their_commands(sleepy: str) -> None:
    result = rrfp("check", "faults", "--runs", "20", "--hint", sleepy, "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["ok"]) == (1, False)
    assert all("replay it with: rrfp check faults --seed " in line for line in answer["failed"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--runs", "0"), "runs is 0, must be at least 1"),
        (("--runs", "2", "--trace"), "--trace goes with one run"),
        (("--hint", "nobody"), "hint is 'nobody', must be one of: bf"),
    ],
)
def test_bad_usage_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = rrfp("check", "faults", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
