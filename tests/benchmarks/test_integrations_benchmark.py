"""torch's, Megatron's and RRFP's schedules on the same stages: what runs and is held, and how emulated RECVs behave."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from fork_server import fork_server, printed, run

from benchmarks.integrations.beside_megatron import beside_engine
from benchmarks.integrations.settings import (
    CASE,
    CASE_PROFILE,
    MEGATRON,
    MEGATRON_1F1B,
    MEGATRON_INTERLEAVED,
    SCHEDULES,
    TORCH_1F1B,
    TORCH_INTERLEAVED,
    TORCH_ZBV,
    Receives,
    Settings,
    case_table,
)
from benchmarks.shared.comparison import Cell
from benchmarks.shared.step_figures import Figures, results_of
from benchmarks.shared.steps import Step
from benchmarks.shared.tables import CHUNKS

__all__ = ["fork_server"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "integrations"


def measured(settings: Settings) -> dict[str, Figures]:
    """The figures of the only cell; every step has been checked."""
    output = printed(FOLDER / "worker.py", settings.to_json(), ranks=settings.stages, timeout_s=55)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    [figures] = results_of(settings, [Step.of(line, settings.METHODS) for line in lines]).values()
    return dict(figures)


def check_memory(settings: Settings, figures: dict[str, Figures], interleaved: str) -> None:
    """What each rank holds at most: torch's interleaved schedule what is computed beforehand, RRFP no more than set."""
    torchs = [settings.held_by_torch(rank) for rank in range(settings.stages)]
    assert list(figures[interleaved].held) == [held / CHUNKS for held in torchs]
    for name, one in figures.items():
        way = settings.METHODS[name]
        if way.as_torch:
            assert all(own <= (held + 1) // CHUNKS for own, held in zip(one.held, torchs, strict=True)), name
        limit = way.options.get("limit")
        most = {"1f1b": (2, 1), "n": (2, 2), "2n": (4, 4)}.get(str(limit), (4, 4))
        assert all(own <= bound for own, bound in zip(one.held, most, strict=True)), name


@pytest.mark.long
def test_all_schedules_alternate_on_the_same_stages_and_do_the_same_work() -> None:
    settings = Settings(2, ("llm",), ("J3",), tuple(SCHEDULES), microbatches=4, rounds=1)

    figures = measured(settings)

    assert list(figures) == list(SCHEDULES)
    for one in figures.values():
        assert set(one.per_peer) == {TORCH_1F1B, TORCH_INTERLEAVED, TORCH_ZBV}
        assert one.per_own_bound >= 1
    check_memory(settings, figures, TORCH_INTERLEAVED)


@pytest.mark.slow
@pytest.mark.long
def test_the_case_of_172668_runs_in_all_ways_on_the_same_stages() -> None:
    settings = Settings(2, (CASE_PROFILE,), ("none",), tuple(CASE), microbatches=4, rounds=1)

    figures = measured(settings)

    assert list(figures) == list(CASE)
    assert all(one.per_bound == one.per_own_bound >= 1 for one in figures.values())
    check_memory(settings, figures, "torch, posted")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_megatrons_schedules_and_rrfp_alternate_on_the_same_chunks() -> None:
    settings = Settings(2, ("llm",), ("J0",), tuple(MEGATRON), microbatches=4, rounds=1)

    figures = measured(settings)

    assert list(figures) == list(MEGATRON)
    check_memory(settings, figures, MEGATRON_INTERLEAVED)
    assert figures[MEGATRON_1F1B].held == (2, 1)
    data = beside_engine(settings, Cell(2, "llm", "J0"), figures)
    for name, each in data.items():
        assert 0.9 * each["engine_s"] <= figures[name].seconds
        assert each["per_peer"] > 0
    # Without jitter the engine has 1F1B's order and its time where RRFP may hold as much.
    assert data["RRFP, one, window"]["engine_s"] == pytest.approx(data[MEGATRON_1F1B]["engine_s"])


def test_the_case_has_one_factor_for_both_tasks_and_tables_that_repeat() -> None:
    plain, jittered, again = (case_table(2, 8, jitter, seed=1, step=2) for jitter in ("none", *["log-normal 0.4"] * 2))

    assert (plain.chunks, plain.placement, plain.split) == (2, "looped", False)
    assert list(plain.work()) == pytest.approx([8 * 2 * 0.060] * 2)
    assert jittered == again
    assert jittered != case_table(2, 8, "log-normal 0.4", seed=1, step=3)
    np.testing.assert_allclose(jittered.backward, 2 * jittered.forward)
    assert np.log(jittered.forward / plain.forward).std() == pytest.approx(0.4, abs=0.15)


@pytest.mark.parametrize("receives", list(Receives))
def test_recvs_behave_as_they_are_named_and_torch_is_restored(receives: Receives) -> None:
    printed(Path(__file__).with_name("receives_ranks.py"), receives, ranks=2, timeout_s=30)


def test_bad_arguments_are_refused_in_one_line() -> None:
    [done] = run(FOLDER / "run.py", "--rounds", "0")

    assert done.code == 2
    assert "--rounds is 0, must be at least 1" in done.errors
    assert "Traceback" not in done.errors
