"""Callbacks see a run: in order, on a thread of their own, and without any effect on it."""

from __future__ import annotations

import ast
import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import fork_server
from pipeline.notes import Notes
from runtime.processes import Processes, emulated_steps
from runtime.toys import WIDTH, Bomb, Trap, data, fail_at, loss_fn, same_bits, stages

import rrfp
from rrfp import timeouts
from rrfp.callbacks import Callback, RunBegun, StepEnded
from rrfp.errors import ConfigError, PipelineAborted
from rrfp.model.mesh import Mesh
from rrfp.pipeline import callback_runner
from rrfp.testing.clock import EmulatedStage, TimerLane, run_virtual

__all__ = ["fork_server"]

BATCH = data(3)
STEP = ["step_begun", "step_ended"]


def pipeline(*callbacks: Callback, modules: Any = None, **options: Any) -> Any:
    return rrfp.local(modules or stages(2), loss_fn=loss_fn, callbacks=list(callbacks), **options)


def step(pipe: Any) -> rrfp.StepResult:
    result: rrfp.StepResult = pipe.step(BATCH.inputs, BATCH.targets)
    return result


def run(made: Any, between: Callable[[], None]) -> None:
    """Two steps, and something between them."""
    with made.blocking() as pipe:
        step(pipe)
        between()
        step(pipe)


def test_events_come_in_order_on_a_thread_of_their_own_with_the_figures_of_the_results() -> None:
    notes = Notes()
    with pipeline(notes, first_step=5, limit=rrfp.Limit(2, bytes=1 << 20)).blocking() as pipe:
        results = [step(pipe), pipe.evaluate(BATCH.inputs, BATCH.targets), step(pipe)]
        with pytest.raises(ConfigError):
            pipe.step([])
    assert notes.methods == ["run_begun", *STEP, "evaluation_ended", *STEP, "run_ended"]
    assert notes.threads == {"rrfp-callbacks"}
    begun, ended = notes.found[0][1], notes.found[-1][1]
    assert (begun.step, begun.topology.stages, begun.method) == (
        5,
        2,
        f"hint slot-aware-pyramid, limit {rrfp.Limit(2, bytes=1 << 20)}",
    )
    assert (ended.step, ended.dropped) == (7, 0)
    assert [(each.step, each.microbatches) for each in notes.of("step_begun")] == [(5, 3), (6, 3)]
    events = [notes.found[2][1], notes.found[3][1], notes.found[5][1]]
    for event, result in zip(events, results, strict=True):
        assert (event.mode, event.step, event.loss, event.seconds) == (
            result.mode,
            result.step,
            result.loss,
            result.seconds,
        )
        assert tuple(stage.breakdown for stage in event.stages) == result.breakdown
        assert tuple(stage.peaks for stage in event.stages) == result.peaks
        assert [stage.peaks_by_rank for stage in event.stages] == [{0: result.peaks[0]}, {1: result.peaks[1]}]
        assert [(stage.stage, stage.slots, stage.byte_limit) for stage in event.stages] == [
            (0, 2, 1 << 20),
            (1, 2, 1 << 20),
        ]
    times = [event.time for _, event in notes.found]
    assert times == sorted(times)


def test_a_step_has_its_own_tensor_bytes() -> None:
    """Beside its activations and gradients those of the all-gathers, which are small."""
    notes = Notes()
    inputs = [torch.zeros(200, WIDTH, dtype=torch.float64) for _ in range(3)]
    with pipeline(notes).blocking() as pipe:
        for _ in range(2):
            pipe.step(inputs, inputs)
        pipe.evaluate(inputs, inputs)
    one_way = sum(tensor.nbytes for tensor in inputs)
    both, sends, receives = (one_way, one_way), (one_way, 0), (0, one_way)
    moved = [[(s.sent_bytes, s.received_bytes) for s in e.stages] for e in notes.of("step_ended")]
    moved += [[(s.sent_bytes, s.received_bytes) for s in e.stages] for e in notes.of("evaluation_ended")]
    for stages_moved, expected in zip(moved, ([both, both], [both, both], [sends, receives]), strict=True):
        for found, least in zip(stages_moved, expected, strict=True):
            assert all(0 <= number - own < 4096 for number, own in zip(found, least, strict=True)), (found, least)


@pytest.mark.parametrize("loop", ["own", "caller"])
def test_the_async_api_delivers_the_same(loop: Any) -> None:
    notes = Notes()

    async def main() -> None:
        async with pipeline(notes, loop=loop) as pipe:
            await pipe.step(BATCH.inputs, BATCH.targets)
            await pipe.evaluate(BATCH.inputs, BATCH.targets)

    asyncio.run(main())
    assert notes.methods == ["run_begun", *STEP, "evaluation_ended", "run_ended"]


@pytest.mark.allow_blocking(reason="in virtual time nothing else happens while callbacks are waited for")
def test_virtual_time_is_no_obstacle() -> None:
    notes, lanes = Notes(), [TimerLane() for _ in range(2)]
    graph = rrfp.hints.Graph.chain(2)
    programs = [EmulatedStage(graph, lambda task: 1.0, spend=lane.spend) for lane in lanes]

    async def main() -> float:
        options: Any = {"lane": lanes.__getitem__, "transport": "simulated", "strict": "1f1b"}
        async with rrfp.local(programs, loop="caller", callbacks=[notes], **options) as pipe:
            return (await pipe.step(microbatches=4)).seconds

    assert run_virtual(main()) == 10
    assert notes.methods == ["run_begun", *STEP, "run_ended"]
    assert notes.of("step_ended")[0].seconds == 10


class Raising(Callback):
    """Fails in every method."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name == "check":
            return super().__getattribute__(name)
        return self._fail

    def _fail(self, event: Any) -> None:
        raise SystemExit("enough")


def test_a_callback_that_raises_is_named_once_a_method_and_changes_no_bit(caplog: pytest.LogCaptureFixture) -> None:
    notes = Notes()

    def train(modules: Any, *callbacks: Callback) -> list[float | None]:
        with pipeline(*callbacks, modules=modules, deterministic=True).blocking() as pipe:
            return [step(pipe).loss for _ in range(3)]

    watched, alone = stages(2), stages(2)
    caplog.set_level(logging.WARNING, "rrfp")
    assert train(watched, Raising(), notes) == train(alone)
    assert same_bits(watched, alone)
    assert notes.methods == ["run_begun", *STEP * 3, "run_ended"]
    name = f"{__name__}.Raising"
    first = [
        f"callback {name}.{method} raised SystemExit: enough; it is called again for later events, and training goes on"
        for method in ("run_begun", *STEP, "run_ended")
    ]
    again = [f"callback {name}.{method} raised 3 times in this run; the first error was logged" for method in STEP]
    assert caplog.messages == first + again
    assert caplog.records[0].exc_info is not None


class Slow:
    """Holds the thread of callbacks up in the first `step_begun`."""

    def __init__(self) -> None:
        self.begun, self.release = threading.Event(), threading.Event()

    def __call__(self, method: str, event: Any) -> None:
        if method == "step_begun" and event.step == 0:
            self.begun.set()
            assert self.release.wait(50)


def test_a_slow_callback_delays_no_step_and_misses_nothing() -> None:
    slow = Slow()
    notes = Notes(slow)
    with pipeline(notes).blocking() as pipe:
        for _ in range(6):
            step(pipe)
        assert slow.begun.wait(20)
        assert notes.methods == ["run_begun", "step_begun"]
        slow.release.set()
    assert notes.methods == ["run_begun", *STEP * 6, "run_ended"]


def test_beyond_the_bound_whole_steps_are_dropped_counted_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(callback_runner, "MOST_WAITING", 4)
    slow = Slow()
    notes = Notes(slow)
    caplog.set_level(logging.WARNING, "rrfp")
    with pipeline(notes).blocking() as pipe:
        step(pipe)
        assert slow.begun.wait(20)
        for _ in range(4):
            step(pipe)
        pipe.evaluate(BATCH.inputs, BATCH.targets)
        slow.release.set()
    # The end of step 0 waits, then steps 1 and 2, whole; two events of steps 3 and 4 each, and the evaluation are lost.
    assert notes.methods == ["run_begun", *STEP * 3, "run_ended"]
    assert notes.of("run_ended")[0].dropped == 5
    (line,) = caplog.messages
    assert line.startswith("callbacks are 5 events behind, and pipeline.notes.Notes.step_begun has not returned for ")


@pytest.mark.parametrize(
    "modules", [[Bomb(fail_at(4, Trap("boom"))), *stages(1)], [*stages(1), Bomb(fail_at(4, Trap("boom")))]]
)
def test_an_abort_comes_with_its_origin_and_ends_the_events(modules: Any) -> None:
    notes = Notes()
    with pytest.raises(PipelineAborted) as raised:
        run(pipeline(notes, modules=modules), lambda: None)
    assert notes.methods == ["run_begun", *STEP, "step_begun", "aborted", "run_ended"]
    (event,) = notes.of("aborted")
    assert (event.step, event.origin) == (1, raised.value.origin)


def test_an_exception_of_the_callers_own_is_an_abort_too() -> None:
    notes = Notes()

    def fail() -> None:
        notes.wait_for("step_ended")
        raise Trap("between two steps")

    with pytest.raises(Trap):
        run(pipeline(notes), fail)
    assert notes.methods == ["run_begun", *STEP, "aborted", "run_ended"]
    assert notes.of("aborted")[0].origin.cause == "Trap: between two steps"


def test_a_pipeline_that_does_not_start_calls_nothing(caplog: pytest.LogCaptureFixture) -> None:
    notes = Notes()
    with pytest.raises(Trap), pipeline(notes, transport=fail_to_start).blocking():
        pass
    assert notes.methods == []


def fail_to_start(context: Any) -> Any:
    raise Trap("no transport")


def test_after_an_abort_leaving_gives_up_a_callback_that_does_not_return(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeouts, "CALLBACKS_END_S", 0.05)
    slow = Slow()

    def fail() -> None:
        assert slow.begun.wait(20)
        raise Trap

    with pytest.raises(Trap):
        run(pipeline(Notes(slow)), fail)
    slow.release.set()
    (line,) = [line for line in caplog.messages if "left without it" in line]
    assert line.startswith("pipeline.notes.Notes.step_begun has not returned for ")
    assert line.endswith("left without it, and without 3 event(s) that wait for it")


def test_leaving_in_order_waits_for_a_slow_callback_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "STALL_AFTER_S", 0.05)
    slow = Slow()
    notes, lines = Notes(slow), []

    class Releases(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            slow.release.set()

    logger, handler = logging.getLogger("rrfp.pipeline.callback_runner"), Releases()
    logger.addHandler(handler)
    try:
        with pipeline(notes).blocking() as pipe:
            step(pipe)
            assert slow.begun.wait(20)
    finally:
        logger.removeHandler(handler)
    assert notes.methods == ["run_begun", *STEP, "run_ended"]
    assert lines[0].startswith("leaving waits for pipeline.notes.Notes.step_begun, which has not returned for ")
    assert lines[0].endswith("2 event(s) wait for it")


@pytest.mark.parametrize("wrong", [Notes(), [Notes], [print], "abc"])
def test_what_is_no_list_of_callbacks_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"callbacks is .*, must be a list of rrfp\.callbacks\.Callback"):
        rrfp.local(stages(2), callbacks=wrong)


def test_a_mistake_that_a_callback_knows_before_the_run_is_raised_by_the_pipeline() -> None:
    class Picky(Callback):
        def check(self, topology: rrfp.Topology) -> None:
            raise ConfigError(f"no use on {topology.stages} stages")

    with pytest.raises(ConfigError, match="no use on 2 stages"):
        pipeline(Picky())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    running: list[Processes] = []

    def make(count: int, program: Any, **options: Any) -> Processes:
        running.append(Processes(tmp_path, count, program, **options))
        return running[-1]

    yield make
    for processes in running:
        processes.kill()


class PeaksOfRanks(Callback):
    """Writes those of the stages of the last step, a file a rank, beside what the ranks of its replica held."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rank = 0

    def run_begun(self, event: RunBegun) -> None:
        self._rank = event.topology.rank

    def step_ended(self, event: StepEnded) -> None:
        by_rank = [{rank: peaks.held for rank, peaks in stage.peaks_by_rank.items()} for stage in event.stages]
        own = [stage.peaks.held for stage in event.stages]
        (self._folder / f"{self._rank}.peaks").write_text(repr((by_rank, own)))


def test_each_process_of_two_replicas_delivers_its_own(start: Any, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    mesh = Mesh((("pp", 2), ("dp", 2)))
    options: Any = {"callbacks": [Notes(folder=folder), PeaksOfRanks(folder)], "loss_fn": None}
    processes = start(4, emulated_steps, seconds=0.0, mesh=mesh, **options)
    assert [processes.end(rank).error for rank in range(4)] == [""] * 4
    expected = ["run_begun 0 None"]
    for number in range(3):
        expected += [f"step_begun {number} None", f"step_ended {number} 0.0"]
    for rank in range(4):
        assert (folder / str(rank)).read_text().splitlines() == [*expected, "run_ended 3 None"], rank
    seen = [ast.literal_eval((folder / f"{rank}.peaks").read_text()) for rank in range(4)]
    by_rank = seen[0][0]
    assert [set(ranks) for ranks in by_rank] == [{0, 1}, {2, 3}]  # of both replicas, the same on all ranks
    for rank, found in enumerate(seen):
        assert found == (by_rank, [by_rank[0][rank % 2], by_rank[1][2 + rank % 2]]), rank
