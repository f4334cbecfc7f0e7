"""Random pipelines beyond what can be explored, any delay and lane depth: each rule ends every run within its bound."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from batches import long

from rrfp import Hint, View
from rrfp.core import events as ev
from rrfp.core.ready_set import ReadySet
from rrfp.core.stage_core import StageCore
from rrfp.lab.cluster.random_run import RandomRun
from rrfp.lab.explore.cases import BackwardDrain
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement
from rrfp.model.tasks import Kind, Mode, Task


class AnyReady(Hint):
    """Takes any ready task; at times always one kind first."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._first = self._random.choice(("F", "B", ""))

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        tasks = list(ready)
        return self._random.choice([task for task in tasks if task.kind == self._first] or tasks)


@pytest.mark.parametrize("rule", ["staircase", "paper"])
@pytest.mark.parametrize("batch", [0, *map(long, range(1, 4))])
def test_every_run_ends_and_d_keeps_its_bound(rule: str, batch: int) -> None:
    """`RandomRun` counts D anew; a failing seed is in the message."""
    for seed in range(batch * 40, batch * 40 + 40):
        rng = random.Random(seed)
        stages, chunks, microbatches = rng.randint(1, 6), rng.randint(2, 4), rng.randint(2, 10)
        placement = Placement(stages, chunks, rng.choice(("looped", "v")))
        virtual_stages = range(stages * chunks)
        split = rng.choice(((True,), (False,), (True, False)))
        graph = TaskGraph(placement, split=tuple(rng.choice(split) for _ in virtual_stages))
        kind = rng.choice((None, Kind.F, Kind.B, Kind.W))
        where = rng.sample(virtual_stages, rng.randint(1, len(virtual_stages)))
        in_order = [(kind, v) for v in where if kind in graph.kinds(v, Mode.TRAIN)] if kind else []
        limits = [Limit(rng.randint(1, 5), rule=rule) for _ in range(stages)]
        hints = [AnyReady(rng.randrange(1 << 30)) for _ in range(stages)]
        network = RandomRun(graph, hints, limits, seed=seed, depth=rng.randint(1, 3), in_order=in_order)
        try:
            network.run([(Mode.TRAIN, microbatches), (Mode.FORWARD, microbatches)])
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from None


def previewing(guess: Callable[[int], int | None]) -> type[StageCore]:
    """A core that is shown a number of each microbatch as soon as a step opens."""

    class Previewing(StageCore):
        def apply(self, event: ev.Event) -> tuple[ev.Instruction, ...]:
            instructions = super().apply(event)
            if isinstance(event, ev.StepOpened):
                for v in self.graph.placement.virtual_stages(self.stage):
                    for m in range(event.microbatches):
                        super().apply(ev.Previewed(Task(Kind.F, m, v), guess(m)))
            return instructions

    return Previewing


@pytest.mark.parametrize("knows", ["exactly", "nothing", "zeros", "at random"])
@pytest.mark.parametrize("batch", [0, *map(long, range(1, 4))])
def test_limits_on_bytes_end_every_run_whatever_is_expected(knows: str, batch: int) -> None:
    """One chunk and no forced order pass the limit by less than one microbatch."""
    for seed in range(batch * 25, batch * 25 + 25):
        rng = random.Random(seed)
        stages, chunks, microbatches = rng.randint(1, 4), rng.randint(1, 3), rng.randint(2, 8)
        graph = TaskGraph(
            Placement(stages, chunks, rng.choice(("looped", "v"))), split=(rng.random() < 0.5,) * stages * chunks
        )
        held = [rng.randint(1, 9) for _ in range(microbatches)]
        noise = [rng.randint(0, 99) for _ in range(microbatches)]
        guesses: dict[str, Callable[[int], int | None]] = {
            "exactly": held.__getitem__,
            "nothing": lambda m: None,
            "zeros": lambda m: 0,
            "at random": noise.__getitem__,
        }
        kind = rng.choice((None, None, Kind.F, Kind.B))
        in_order = [(kind, v) for v in range(stages * chunks)] if kind else []
        limit = Limit(rng.choice((None, 1, 3)), rng.randint(1, 30))
        network = RandomRun(
            graph,
            [AnyReady(rng.randrange(1 << 30)) for _ in range(stages)],
            [limit] * stages,
            seed=seed,
            depth=rng.randint(1, 3),
            in_order=in_order,
            num_bytes=lambda task, held=held: held[task.microbatch],  # type: ignore[misc]
            make_core=previewing(guesses[knows]),
        )
        try:
            network.run([(Mode.TRAIN, microbatches)] * 2)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from None
        if chunks == 1 and not in_order:
            most = max(network.most_bytes(stage, 0) for stage in range(stages))
            assert most < (limit.bytes or 0) + max(held), f"seed {seed}"


class IgnoresItsLimit(StageCore):
    """Holds whatever comes."""

    def __init__(self, graph: TaskGraph, stage: int, hint: Hint, limit: Limit, **options: Any) -> None:
        super().__init__(graph, stage, hint, Limit(), **options)


@pytest.mark.parametrize("mode", [*Mode])
def test_a_core_that_ignores_its_limit_is_found_in_both_modes(mode: Mode) -> None:
    """The checker counts D anew, and never asks the core."""
    network = RandomRun(TaskGraph.chain(2), [AnyReady(0), AnyReady(1)], [Limit(1), Limit(1)], make_core=IgnoresItsLimit)
    with pytest.raises(AssertionError, match=r"holds 2 chunk tasks, the most allowed is 1, after starting F\d@\d"):
        network.run([(mode, 6)])


class KeepsNothingFree(StageCore):
    """Starts any forward while a slot is free."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, admission=BackwardDrain)


def test_a_core_that_leaves_the_staircase_is_found_where_d_keeps_its_bound() -> None:
    """The checker asks the rule about the slots of each chunk, too."""
    hints = [AnyReady(0), AnyReady(1)]
    network = RandomRun(TaskGraph.chain(2, chunks=2), hints, [Limit(1), Limit(1)], make_core=KeepsNothingFree)
    with pytest.raises(AssertionError, match="holds 2 chunk tasks up to chunk 0, the most allowed is 1"):
        network.run([(Mode.TRAIN, 6)])


@pytest.mark.parametrize("mode", [*Mode])
def test_the_bytes_of_a_microbatch_are_counted_anew_in_both_modes(mode: Mode) -> None:
    network = RandomRun(TaskGraph.chain(2), [AnyReady(0), AnyReady(1)], [Limit(1), Limit(1)], num_bytes=lambda task: 7)
    network.run([(mode, 4)])
    assert [network.most_bytes(stage, 0) for stage in range(2)] == [7, 7]
