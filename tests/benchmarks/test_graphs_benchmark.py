"""The graphs benchmark compares equal work at equal bytes, and names each aim that is missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fork_server import fork_server, run

from benchmarks.graphs.figures import AIMS, COMPARED, Figures
from benchmarks.graphs.runs import CHAIN, FORMS, LIMITS, Case, Outcome, run_case
from rrfp.lab.generators.multimodal import multimodal_costs

__all__ = ["fork_server"]

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "graphs" / "run.py"


def test_a_case_has_a_step_time_for_every_form() -> None:
    outcome = run_case(Case(2, "wire", (0.6, 0.4), "N", 3, "bf"))
    assert set(outcome.seconds) == set(outcome.passed) == set(FORMS)
    assert all(seconds > 0 for seconds in outcome.seconds.values())


def test_the_limits_are_eight_and_sixteen_microbatches_of_average_size() -> None:
    held = multimodal_costs("chain", 8, 4000, images=1, sounds=1).held
    assert held is not None
    assert {name: round(most / held.mean()) for name, most in LIMITS.items()} == {"N": 8, "2N": 16}


def made_up(shares_of_chain: list[float], latency: str = "wire") -> list[Outcome]:
    """The chain takes 2 s."""
    return [
        Outcome(
            Case(8, latency, (0.6, 0.4), "N", seed, "bf"),
            {form: 2.0 if form == CHAIN else 2.0 * share for form in FORMS},
            dict.fromkeys(FORMS, -1.0),
        )
        for seed, share in enumerate(shares_of_chain)
    ]


def test_shares_are_means_over_seeds_with_their_scatter() -> None:
    figures = Figures(made_up([0.8, 1.0]))
    (row,) = figures.rows
    share = figures.share(row, "branch, skipped")
    assert share.mean == pytest.approx(0.9)
    assert share.interval == pytest.approx(2.093 * 0.1)
    assert share.emulated == 0.91
    assert figures.chain(row) == 2
    assert figures.share((8, "wire", (0.6, 0.4), "N"), "branch").emulated == 0.93


def test_each_aim_that_is_missed_is_named() -> None:
    assert len(list(Figures(made_up([0.79])).missed())) == 0
    assert [line.partition(":")[0] for line in Figures(made_up([0.81])).missed()] == ["co-located, skipped"]
    assert len(list(Figures(made_up([0.81], "spike")).missed())) == 0
    assert len(list(Figures(made_up([0.93], "spike")).missed())) == 2
    assert {form for form, _ in AIMS} <= {*COMPARED}


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_quick_run_covers_all_rows() -> None:
    [done] = run(SCRIPT, "--quick", "--json", "--jobs", "1", timeout_s=150)
    assert done.code == 0, done.errors[-4000:]
    document = json.loads(done.output)
    assert document["tables"] == len(document["rows"]) == 2 * 3 * len(LIMITS)
    assert all(0 < row[form]["mean"] < 10 for row in document["rows"] for form in COMPARED)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seeds", "0"), "--seeds is 0, must be at least 1"),
        (("--hint", "gpt"), "invalid choice: 'gpt' (choose from"),
        (("--seeds", "1", "--stages", "0", "--jobs", "1"), "stages is 0, must be a whole number >= 1"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    [done] = run(SCRIPT, *arguments)
    assert done.code != 0
    assert message in done.errors
    assert "Traceback" not in done.errors
