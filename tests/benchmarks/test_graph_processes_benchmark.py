"""The benchmark of graphs in real processes: its graphs are those of its tables, its figures those of paired rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.graphs.forms import Settings, Turn, declared, visits_of
from benchmarks.graphs.processes import Figure, Step, aims, figure_of, figures_of
from benchmarks.graphs.runs import CHAIN, FORMS, LIMITS
from rrfp.model.model_graph import ModelGraph

SETTINGS = Settings(4, 0.6, 0.4, microbatches=6, rounds=3)
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("form", [form for form in FORMS if form != CHAIN])
def test_a_form_runs_the_graph_of_its_table(form: str) -> None:
    table = SETTINGS.table(Turn(1, "N", form))
    model = ModelGraph.of(declared(table))
    wanted = table.to_graph()
    assert model.tasks.names == wanted.names
    assert model.tasks.placement == wanted.placement
    assert sorted(model.tasks.edges or ()) == sorted(wanted.edges or ())
    assert model.visits_of(visits_of(table), table.microbatches) == table.visits


def test_the_pace_stretches_tasks_and_no_bytes() -> None:
    turn = Turn(1, "N", "co-located, skipped")
    table, slow = SETTINGS.table(turn), replace(SETTINGS, pace=3.0).table(turn)
    assert np.array_equal(slow.forward, 3 * table.forward)
    assert np.array_equal(slow.backward, 3 * table.backward)
    assert table.held is not None
    assert slow.held is not None
    assert np.array_equal(slow.held, table.held)


def test_every_form_meets_every_limit_in_every_round_and_each_comes_first() -> None:
    turns = list(SETTINGS.turns())
    assert len(turns) == len(set(turns)) == (SETTINGS.rounds + 1) * len(LIMITS) * len(FORMS)
    firsts = [next(turn.form for turn in turns if turn.number == number) for number in range(SETTINGS.rounds + 1)]
    assert len(set(firsts)) == len(firsts)


def step(number: int, form: str, seconds: float, others: float = 0.0) -> Step:
    return Step(Turn(number, "N", form), seconds, others, held=0.5, processor_s=2 * seconds)


def test_a_round_counts_only_where_both_steps_were_undisturbed() -> None:
    chain = [step(1, CHAIN, 2.0), step(2, CHAIN, 2.0, others=0.9), step(3, CHAIN, 4.0)]
    other = [step(1, "branch", 1.0), step(2, "branch", 9.0), step(3, "branch", 3.0)]
    figure = figure_of(other, chain, SETTINGS)
    assert figure.ratio == pytest.approx((1 / 2 + 3 / 4) / 2)
    assert (figure.used, figure.rounds, figure.is_disturbed) == (2, 3, False)
    assert (figure.milliseconds, figure.processor_s) == (2000.0, 4.0)
    busy = figure_of([step(2, "branch", 9.0)], chain, SETTINGS)
    assert (busy.ratio, busy.is_disturbed) == (4.5, True)


def test_an_aim_is_met_or_missed_for_the_shares_that_it_is_for() -> None:
    chain, faster = [step(1, CHAIN, 1.0)], [step(1, "branch, skipped", 0.9)]
    figures = figures_of(SETTINGS, [*chain, *faster])
    assert isinstance(figures["N", "branch, skipped"], Figure)
    assert list(aims([(SETTINGS, figures)])) == ["PP 4, N, branch, skipped: 0.900, aim 0.92: met"]
    assert not list(aims([(Settings(4, 1.0, 1.0), figures)]))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_quick_run_measures_every_form() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "graphs" / "processes.py"), "--quick", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert ended.returncode == 0, ended.stderr
    results = json.loads(ended.stdout)["results"]
    assert {(each["limit"], each["form"]) for each in results} == {(limit, form) for limit in LIMITS for form in FORMS}
