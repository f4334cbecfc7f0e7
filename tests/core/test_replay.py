"""A core that is told what another was told comes to the same state, wherever the run has stopped."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest

from rrfp import Hint, View
from rrfp.core import events as ev
from rrfp.core.event_history import EventHistory, Known
from rrfp.core.stage_core import StageCore
from rrfp.core.waiting import state_of
from rrfp.errors import ConfigError, Origin, ProtocolError
from rrfp.hints.priorities import BackwardForward
from rrfp.hints.registry import create_hint, create_strict
from rrfp.lab.cluster.random_run import RandomRun
from rrfp.lab.explore.cases import random_visits
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import TablePlacement
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.model.topology import Topology
from rrfp.model.visits import Visits
from rrfp.trace.event_log import Recording, read_event_log, write_event_log

BRANCH = TaskGraph(TablePlacement((0, 1, 2)), ((0, 2), (1, 2)), (True, False, True), ("audio", "vision", "text"))


class _Stop(Exception):
    """Ends a run somewhere."""


def stopped_run(seed: int, **options: Any) -> list[StageCore]:
    """The cores of two or three steps that end anywhere."""
    rng = random.Random(seed)
    graph = rng.choice([TaskGraph.chain(3), TaskGraph.chain(2, chunks=2, layout="v", split=True), BRANCH])
    stages = graph.placement.stages
    limit = rng.choice([Limit(2), Limit(3), Limit(2, rule="paper"), Limit(3, 60), Limit(bytes=45)])
    hint = rng.choice(["bf", "slot-aware-pyramid", "bfw", "f-priority"])
    steps = [(Mode.TRAIN, 4), (rng.choice([*Mode]), 3), (Mode.TRAIN, 5)]
    left = rng.randrange(20, 400)
    cores: list[StageCore] = []

    class Core(StageCore):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords, history=EventHistory())
            cores.append(self)

        def apply(self, event: ev.Event) -> tuple[ev.Instruction, ...]:
            nonlocal left
            left -= 1
            if not left:
                raise _Stop
            return super().apply(event)

    run = RandomRun(
        graph,
        [create_hint(hint) for _ in range(stages)],
        [limit] * stages,
        seed=seed,
        make_core=Core,
        num_bytes=lambda task: 9 + task.microbatch % 3,
        in_order=[(Kind.B, 0)] if rng.random() < 0.3 else (),
        members=rng.choice([1, 1, 2]),
        visits=[random_visits(3, number, rng) for _, number in steps] if graph is BRANCH else (),
    )
    with suppress(_Stop):
        run.run(steps)
    return cores


@pytest.mark.parametrize("batch", range(4))
def test_a_replayed_core_is_in_the_recorded_state_in_memory_and_from_a_file(batch: int, tmp_path: Path) -> None:
    in_steps = set()
    for seed in range(batch * 25, batch * 25 + 25):
        for rank, core in enumerate(stopped_run(seed)):
            replayed, refused = Recording.of(core).replay()
            assert (state_of(replayed), refused) == (state_of(core), ()), (seed, rank)
            log = read_event_log(
                write_event_log(tmp_path, Topology(core.stage, core.graph.placement.stages), core, "stopped")
            )
            assert (log.topology.stage, log.why, log.state) == (
                core.stage,
                "stopped",
                json.loads(json.dumps(state_of(core))),
            )
            again, refused = log.recording.replay()
            assert (state_of(again), refused) == (state_of(core), ()), (seed, rank)
            in_steps.add(core.step.id.number if core.step else None)
    assert in_steps >= {0, 1, 2}


class Backwards(BackwardForward):
    """Takes the microbatches from the last on."""

    def microbatch_order(self, view: View) -> Sequence[int]:
        return range(view.microbatches - 1, -1, -1)


class Refuses(BackwardForward):
    """Refuses the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def open_step(self, view: View) -> None:
        self.steps += 1
        if self.steps > 1:
            raise ConfigError("this one not")
        super().open_step(view)


def told(core: StageCore, *events: ev.Event) -> StageCore:
    for event in events:
        core.apply(event)
    return core


def core_of(hint: Hint, graph: TaskGraph | None = None) -> StageCore:
    return StageCore(TaskGraph.chain(1) if graph is None else graph, 0, hint, Limit(2), history=EventHistory())


def test_the_order_of_microbatches_that_a_hint_asks_for_is_replayed() -> None:
    core = told(core_of(Backwards()), ev.StepOpened(0, Mode.TRAIN, 3))
    assert str(next(core.ready.heads())) == "F2@0"
    replayed, _ = Recording.of(core).replay()
    assert state_of(replayed) == state_of(core)


def test_with_a_strict_schedule_a_split_backward_is_never_deferred() -> None:
    core = told(core_of(create_strict("zb-h1"), TaskGraph.chain(1, split=True)), ev.StepOpened(0, Mode.TRAIN, 2))
    assert Recording.of(core).may_wait
    replayed, _ = Recording.of(core).replay()
    assert state_of(replayed) == state_of(core)
    assert replayed.hint.may_wait


def test_what_the_core_refused_it_refuses_again_and_goes_on_in_the_same_state() -> None:
    core = told(core_of(BackwardForward()), ev.StepOpened(0, Mode.TRAIN, 2), ev.Enqueued(Task(Kind.F, 1, 0)))
    with pytest.raises(ProtocolError):
        core.apply(ev.Enqueued(Task(Kind.B, 0, 0)))
    told(core, ev.Completed(Task(Kind.F, 1, 0), 3), ev.Aborted(Origin(0, None, "ProtocolError: B0@0")))
    replayed, (refusal,) = Recording.of(core).replay()
    assert (refusal.number, refusal.event) == (2, ev.Enqueued(Task(Kind.B, 0, 0)))
    assert str(refusal.error).startswith("B0@0 was enqueued on stage 0 without its inputs")
    assert state_of(replayed) == state_of(core)


def test_a_step_that_the_hint_refused_is_refused_again() -> None:
    core = told(core_of(Refuses()), ev.StepOpened(0, Mode.FORWARD, 1), ev.Enqueued(Task(Kind.F, 0, 0)))
    told(core, ev.Completed(Task(Kind.F, 0, 0)))
    with pytest.raises(ConfigError, match="this one not"):
        core.apply(ev.StepOpened(1, Mode.FORWARD, 1))
    replayed, (refusal,) = Recording.of(core).replay()
    assert str(refusal.error) == "hint Refuses refused the step"
    assert state_of(replayed) == state_of(core)


def test_only_the_last_two_steps_are_kept_and_none_that_is_too_long() -> None:
    history = EventHistory(most=5)
    core = StageCore(TaskGraph.chain(1), 0, BackwardForward(), history=history)

    def step(number: int, microbatches: int) -> None:
        core.apply(ev.StepOpened(number, Mode.FORWARD, microbatches))
        for m in range(microbatches):
            told(core, ev.Enqueued(Task(Kind.F, m, 0)), ev.Completed(Task(Kind.F, m, 0)))

    def kept() -> list[int]:
        return [each.known.step for each in history.steps]

    for number in range(4):
        step(number, 2)
    assert kept() == [2, 3]
    step(4, 3)
    assert kept() == []
    step(5, 1)
    assert kept() == [5]
    replayed, refused = Recording.of(core).replay()
    assert (state_of(replayed), refused) == (state_of(core), ())


def test_what_a_checkpoint_restores_ends_the_history() -> None:
    core = told(core_of(BackwardForward()), ev.StepOpened(0, Mode.FORWARD, 1), ev.Enqueued(Task(Kind.F, 0, 0)))
    told(core, ev.Completed(Task(Kind.F, 0, 0), seconds=1.0))
    core.restore(core.measured())
    assert Recording.of(core).steps == ()


EVENTS: list[ev.Event] = [
    ev.StepOpened(3, Mode.TRAIN, 2, (1.5, 2.0), 0.5, Visits(2, (frozenset({1}), frozenset()))),
    ev.StepOpened(3, Mode.FORWARD, 2),
    ev.StepOpened(3, Mode.TRAIN, 2, (1.5, 2.0), byte_rooms=(1.5, None)),
    ev.StepOpened(3, Mode.TRAIN, 2, pool=ev.Pool(1, 2, (1, 0), 2, (0.5, 0.25))),
    ev.Offered(StepId(3, Mode.TRAIN, 2), Task(Kind.F, 1, 1), 1),
    ev.Claimed(StepId(3, Mode.TRAIN, 2), Task(Kind.F, 1, 1), 0),
    ev.Granted(StepId(3, Mode.TRAIN, 2), Task(Kind.F, 1, 1), 0),
    ev.StepOpened(4, Mode.TRAIN, 2, pool=ev.Pool(1, 2, (1, 0), is_even=True)),
    ev.Arrived(StepId(3, Mode.TRAIN, 2), Task(Kind.F, 1, 0), 12, 3),
    ev.Enqueued(Task(Kind.W, 1, 2)),
    ev.Previewed(Task(Kind.F, 0, 0), 12, 0),
    ev.Previewed(Task(Kind.F, 0, 0)),
    ev.Completed(Task(Kind.F, 1, 0), 12, 0.125, 3),
    ev.SendReleased(Task(Kind.F, 1, 0), 2),
    ev.Consumed(StepId(3, Mode.FORWARD, 2), 1, Task(Kind.F, 1, 0)),
    ev.BegunReported(StepId(3, Mode.TRAIN, 2), Task(Kind.F, 1, 0), 0.25),
    ev.PauseBegun(),
    ev.PauseEnded(),
    ev.ReadyReported(StepId(3, Mode.TRAIN, 2), 1, Task(Kind.F, 1, 0)),
    ev.Ordered(StepId(3, Mode.TRAIN, 2), 7, Task(Kind.B, 1, 0)),
    ev.HeldReported(StepId(3, Mode.TRAIN, 2), 1, Task(Kind.B, 1, 0), 12, 3),
    ev.ChunkReduced(1),
    ev.Aborted(Origin(1, "F3@2 (audio)", "ValueError: no", 4)),
]


def test_every_event_is_the_same_when_it_is_read_from_a_file(tmp_path: Path) -> None:
    assert {type(event) for event in EVENTS} == set(get_args(ev.Event))
    core = core_of(BackwardForward())
    assert core.history is not None
    core.history.begin(Known(3, early=tuple(EVENTS)))
    for event in EVENTS:
        core.history.note(event)
    (step,) = read_event_log(write_event_log(tmp_path, Topology(0, 1), core, "here")).recording.steps
    assert step.events == EVENTS
    assert step.known == Known(3, early=tuple(EVENTS))


def test_a_log_with_an_old_name_of_an_event_is_read(tmp_path: Path) -> None:
    event = ev.BegunReported(StepId(0, Mode.TRAIN, 2), Task(Kind.F, 1, 0), 0.25)
    lines = lines_of_a_log(tmp_path)
    lines.insert(3, '["Announced", [0, "train", 2], "F1@0", 0.25]\n')
    path = tmp_path / "old.jsonl"
    path.write_text("".join(lines))
    assert read_event_log(path).recording.steps[0].events[1] == event


def lines_of_a_log(folder: Path) -> list[str]:
    core = told(core_of(BackwardForward()), ev.StepOpened(0, Mode.TRAIN, 2), ev.Enqueued(Task(Kind.F, 1, 0)))
    return write_event_log(folder, Topology(0, 1), core, "here").read_text().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("line", "text", "reason"),
    [
        (0, "", "line 1 cannot be read: an event log begins with 'rrfp events': 1"),
        (0, '{"rrfp events": 2}', "line 1 cannot be read: an event log begins with 'rrfp events': 1"),
        (0, '{"rrfp events": 1}', "line 1 has no 'mesh'"),
        (2, '["Opened", 1]', "line 3 cannot be read: event is 'Opened', must be one of: StepOpened, Arrived"),
        (3, '["Enqueued", "X1@0"]', "line 4 cannot be read: task 'X1@0' is not of the form F3@5"),
        (3, '["Enqueued"]', "line 4 cannot be read: Enqueued has 0 fields, must have task"),
        (3, '["Completed", "F1@0", -1, 0.0, 0]', "line 4 cannot be read: held is -1, must be a whole number >= 0"),
        (3, "[" * 100_000, "line 4 cannot be read"),
        (4, "", "line 4 cannot be read: the log ends before the state"),
    ],
)
def test_a_damaged_log_is_one_error_that_names_the_line(line: int, text: str, reason: str, tmp_path: Path) -> None:
    lines = lines_of_a_log(tmp_path)
    lines[line] = text and f"{text}\n"
    path = tmp_path / "damaged.jsonl"
    path.write_text("".join(lines))
    with pytest.raises(ConfigError) as raised:
        read_event_log(path)
    assert str(raised.value).startswith(f"{path}: {reason}")
