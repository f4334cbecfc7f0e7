"""The profiles benchmark compares what it says it compares, and names each aim that is missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fork_server import fork_server, run

from benchmarks.profiles.figures import COMPARISONS, Figures
from benchmarks.profiles.runs import Case, Outcome, run_case
from rrfp.costs import PROFILES

__all__ = ["fork_server"]

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "profiles" / "run.py"


def test_a_case_has_a_makespan_for_every_method_that_is_compared() -> None:
    outcome = run_case(Case("bimodal", 2, "J1", 3))
    wanted = {name for each in COMPARISONS.values() for one in each for name in (one.method, one.base)}
    assert wanted == set(outcome.seconds)
    assert all(seconds > 0 for seconds in outcome.seconds.values())
    assert outcome.passed <= 0, "sizes are known when inputs arrive, so that no limit on bytes is passed"
    assert set(outcome.more_bytes) == {"1f1b", "n", "2n"}


def made_up(profile: str, gain_by_seed: list[float], stages: int = 4) -> list[Outcome]:
    """The default hint takes 1 s; everything else as much longer as the gains say."""
    names = {name for each in COMPARISONS.values() for one in each for name in (one.method, one.base)}
    return [
        Outcome(
            Case(profile, stages, "J0", seed),
            {name: 1.0 if "default" in name else 1 / (1 - gain / 100) for name in names},
            {"1f1b": 5.0, "n": 0.0, "2n": 0.0},
            0.0,
        )
        for seed, gain in enumerate(gain_by_seed)
    ]


def test_gains_are_means_with_the_scatter_of_seeds_and_the_worst_cell() -> None:
    figures = Figures([*made_up("mllm", [10, 20]), *made_up("mllm", [-4, 2], stages=8)])
    gain = figures.gain("mllm", COMPARISONS["whole backward"][0])
    assert gain.mean == pytest.approx(7)
    assert gain.interval == pytest.approx(2.093 * 4)  # the seeds' means are 3 and 11
    assert gain.worst[0] == "PP 8 J0"
    assert gain.worst[1] == pytest.approx(-1)
    assert gain.behind == 25
    assert figures.more_bytes("mllm", "1f1b") == 5


def test_each_aim_that_is_missed_is_named_with_its_place() -> None:
    missed = list(Figures([*made_up("mllm", [12]), *made_up("llm", [-3]), *made_up("video", [16])]).missed())
    assert [line for line in missed if "video" in line] == []
    assert [line.rsplit(", ", 1)[1] for line in missed if "mllm" in line] == ["aim 15"]
    of_llm = [line for line in missed if line not in [other for other in missed if "mllm" in other]]
    assert len(of_llm) == 2, "only the aims of single cells hold for workloads of one modality"
    assert all("llm PP 4 J0 -3.00 ± 0.00, aim -1" in line for line in of_llm)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_quick_run_covers_all_profiles() -> None:
    [done] = run(SCRIPT, "--quick", "--json", "--jobs", "1", timeout_s=150)
    assert done.code == 0, done.errors[-4000:]
    document = json.loads(done.output)
    assert document["tables"] == 4 * len(PROFILES)
    assert {gain["profile"] for gain in document["gains"]} == set(PROFILES)
    assert {gain["table"] for gain in document["gains"]} == set(COMPARISONS)
    assert document["passed"] <= 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seeds", "0"), "--seeds is 0, must be at least 1"),
        (("--profile", "gpt"), "invalid choice: 'gpt' (choose from"),
        (("--seeds", "1", "--stages", "0", "--jobs", "1"), "stages is 0, must be a whole number >= 1"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    [done] = run(SCRIPT, *arguments)
    assert done.code != 0
    assert message in done.errors
    assert "Traceback" not in done.errors
