"""Stalls reach the callbacks of every process when they happen, even between a step and its figures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from pipeline.notes import Notes
from runtime.ranks import ThreadedRanks
from runtime.stuck_hints import RELEASE, Blocks
from runtime.toys import Bomb, Hold, data, loss_fn, stages

import rrfp
from rrfp import timeouts
from rrfp.lab.emulated import EmulatedStage
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Task
from rrfp.pipeline.faces import BlockingPipeline

BATCH = data(1)
STALL_S = 0.1
STEP = ["step_begun", "step_ended"]


def own(*notes: Notes) -> dict[int, Any]:
    """The callbacks of each rank."""
    return {rank: {"callbacks": [each]} for rank, each in enumerate(notes)}


def step(stage: int, pipe: BlockingPipeline) -> Any:
    return pipe.step(BATCH.inputs, BATCH.targets)


def until(notes: tuple[Notes, ...], release: Callable[[], None], *texts: tuple[str, ...]) -> list[int]:
    """The index of a stall on each rank whose text has the parts; ``texts`` are those of each rank, or of all."""
    try:
        return [each.wait_for_stall(*texts[rank % len(texts)]) for rank, each in enumerate(notes)]
    finally:
        release()


def test_a_slow_task_is_named_to_the_callbacks_of_all_ranks() -> None:
    hold, notes = Hold(), (Notes(), Notes())
    ranks = ThreadedRanks([Bomb(hold), *stages(1)], step, own(*notes), stall_after=STALL_S)
    stalls = until(notes, hold.release.set, ("stage 0 has been running F0@0 for",))
    assert [outcome.error for outcome in ranks.join()] == [None] * 2
    for each, index in zip(notes, stalls, strict=True):
        assert [name for name in each.methods if name != "stall"] == ["run_begun", *STEP, "run_ended"]
        assert each.found[index][1].step == 0
        assert index < each.methods.index("step_ended")


def test_a_stall_does_not_wait_for_the_figures_of_the_step_before() -> None:
    """Stage 1 is in its next step while stage 0 holds the last task of this one."""
    release, notes = threading.Event(), (Notes(), Notes())

    def durations(task: Task) -> float:
        if task == Task(Kind.B, 0, 0):
            release.wait(50)
        return 0.0

    def two_steps(stage: int, pipe: BlockingPipeline) -> Any:
        pipe.step(microbatches=1)
        pipe.step(microbatches=1)

    programs: Any = [EmulatedStage(TaskGraph.chain(2), durations) for _ in range(2)]
    ranks = ThreadedRanks(programs, two_steps, own(*notes), stall_after=STALL_S, loss_fn=None)
    _, stall = until(notes, release.set, ("stage 0 has been running B0@0 for",))
    assert [outcome.error for outcome in ranks.join()] == [None] * 2
    assert stall < notes[1].methods.index("step_ended")
    assert [name for name in notes[1].methods if name != "stall"] == ["run_begun", *STEP * 2, "run_ended"]


@pytest.mark.allow_blocking(reason="the hint under test does")
def test_a_loop_that_does_not_run_is_a_stall_of_its_own_process_and_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeouts, "ANSWER_S", 0.3)
    RELEASE.clear()
    notes, batch = (Notes(), Notes()), data(4)

    def body(stage: int, pipe: BlockingPipeline) -> Any:
        return pipe.step(batch.inputs, batch.targets)

    ranks = ThreadedRanks(stages(2), body, own(*notes), hint=Blocks(1), limit="1f1b", stall_after=STALL_S)
    until(notes, RELEASE.set, ("stage 1", "has not answered for"), ("its event loop has not run for",))
    assert [outcome.error for outcome in ranks.join()] == [None] * 2


def test_a_loop_that_never_runs_again_is_an_abort_for_the_callbacks_of_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = Notes()
    with pytest.raises(rrfp.PipelineAborted) as raised:
        give_up(rrfp.local(stages(2), loss_fn=loss_fn, callbacks=[notes]))
    assert notes.methods == ["run_begun", "step_begun", "aborted", "run_ended"]
    assert notes.of("aborted")[0].origin == raised.value.origin


def give_up(pipeline: Any) -> None:
    """A step during which the process takes the loop for stuck."""
    session, first = pipeline._session, BATCH.inputs[0]

    class GivesUp(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            session._give_up(session.ranks._runners[0].stuck(1.0))
            return super().__getitem__(index)

    with pipeline.blocking() as pipe:
        pipe.step(GivesUp([first]), BATCH.targets)
