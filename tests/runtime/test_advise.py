"""``pipe.advise()``: the advice on the newest steps, on rank 0 of a pipeline that goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from runtime.ranks import BATCH, ThreadedRanks
from runtime.toys import loss_fn, stages

import rrfp
from rrfp import StageProgram
from rrfp.errors import ConfigError
from rrfp.hints.priorities import BackwardForward
from rrfp.model.graph import TaskGraph
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.testing.clock import EmulatedStage, TimerLane

STAGES, STEPS = 2, 7


class OwnHint(BackwardForward):
    """A hint that no name leads to."""


def emulated() -> tuple[list[StageProgram], dict[str, Any]]:
    """Stages on timers, which need no core, and the option for them."""
    lanes = [TimerLane() for _ in range(STAGES)]
    programs = [EmulatedStage(TaskGraph.chain(STAGES), lambda task: 0.004, spend=lane.spend) for lane in lanes]
    return [*programs], {"lane": lanes.__getitem__}


@pytest.mark.parametrize("hint", ["bf", OwnHint])
def test_rank_0_gets_the_advice_and_all_go_on(hint: str | Callable[[], Any]) -> None:
    def body(stage: int, pipe: BlockingPipeline) -> Any:
        for _ in range(STEPS):
            pipe.step(microbatches=4)
        advice = pipe.advise()
        pipe.step(microbatches=4)
        return advice

    programs, lane = emulated()
    outcomes = ThreadedRanks(programs, body, hint=hint, limit="1f1b", **lane).join()
    assert [outcome.error for outcome in outcomes] == [None, None]
    advice, nothing = (outcome.value for outcome in outcomes)
    assert nothing is None
    assert advice.steps == (2, 3, 4, 5, 6)
    name = "bf" if hint == "bf" else f"{__name__}.OwnHint"
    assert advice.method == f"4 microbatches on 2 stages, hint {name}, limit 1f1b"
    assert str(advice).startswith("pipeline: 5 steps (left out: 2 at the beginning), 4 microbatches on 2 stages, ")
    assert advice.to_json()["predicted"] > 0.004 * 4


@pytest.mark.parametrize("loop", ["own", "caller"])
async def test_awaited(loop: Any) -> None:
    programs, lane = emulated()
    async with rrfp.local(programs, loop=loop, **lane) as pipe:
        for _ in range(STEPS):
            await pipe.step(microbatches=4)
        advice = await pipe.advise()
        assert advice is not None
        assert advice.causes


def test_what_predicts_nothing_is_refused_and_the_pipeline_goes_on() -> None:
    with rrfp.local(stages(2), loss_fn=loss_fn) as pipe:
        with pytest.raises(ConfigError, match="no training step is recorded"):
            pipe.advise()
        for _ in range(STEPS):
            pipe.step(BATCH.inputs, BATCH.targets)
        with pytest.raises(ConfigError, match="pipeline: all stages ran in one process, whose tasks run one at a time"):
            pipe.advise()
        pipe.step(BATCH.inputs, BATCH.targets)
