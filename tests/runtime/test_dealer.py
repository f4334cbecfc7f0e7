"""`share_replicas="dealt"`: a slow rank's replica runs fewer microbatches, and no caller sees another result."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compute.gloo_ranks import GOOD, outcomes
from fork_server import fork_server
from runtime.dealt_programs import (
    GIVEN,
    MESH,
    QUICK_S,
    SLOW,
    STEPS,
    Counts,
    batch_of,
    losses_of,
    mean,
    programs,
    steps,
)
from runtime.group_programs import aborted
from runtime.ranks import ThreadedRanks
from runtime.toys import loss_fn

import rrfp
from rrfp.compute.rng import replica_seed
from rrfp.core.usage import Peaks
from rrfp.errors import ConfigError, ProtocolError
from rrfp.hints.registry import ScheduleHint
from rrfp.model.mesh import Mesh
from rrfp.model.schedule import Schedule
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.pipeline.options import complete
from rrfp.runtime.steps.deal import ReplicaPace
from rrfp.runtime.steps.dealer import FEW, GivenShare, Paces
from rrfp.runtime.steps.reports import StageReport
from rrfp.trace.breakdown import Breakdown

__all__ = ["fork_server"]

#: A task of one size, where a busy machine's delays must not make the paces.
LONG_S = 5 * QUICK_S


def run(ranks: Sequence[Counts], body: Callable[[int, BlockingPipeline], Any], **options: Any) -> ThreadedRanks:
    return ThreadedRanks(ranks, body, mesh=MESH, share_replicas="dealt", **options)


def test_the_caller_gets_the_results_of_its_own_microbatches() -> None:
    ranks = programs()
    results = [outcome.value for outcome in run(ranks, steps, limit=3).join()]
    for rank, own in enumerate(results):
        replica = MESH.place_of(rank).replica
        assert [result.microbatches for result in own] == [GIVEN[replica]] * STEPS
        for number, result in enumerate(own):
            assert result.losses == pytest.approx(losses_of(replica, number))
            assert result.loss == pytest.approx(mean(number))
            assert result.dealt == results[0][number].dealt
            assert max(result.peak_held) <= 3
    assert [result.dealt for result in results[0][:FEW]] == [()] * FEW
    for result in results[0][FEW:]:
        slow, quick = result.dealt
        assert slow + quick == sum(GIVEN)
        assert slow < GIVEN[0]
    counts = results[0][-1].dealt
    for program in ranks:
        assert sorted(program.ran) == list(range(counts[program.place.replica]))
        assert all(batch.training_step >= FEW for batch in program.reopened)


def test_the_pace_of_a_rank_is_a_median_and_comes_after_a_few_steps() -> None:
    paces = Paces([0, 1, 0, 1])
    for number in range(6):
        seconds = [1.0, 2.0, 3.0, 4.0 if number != 3 else 400.0]
        assert (paces.by_replica() is None) == (number < FEW)
        paces.observe([StageReport(0, 9.0, Breakdown(9.0, 2 * each), Peaks(), microbatches=2) for each in seconds])
    assert paces.by_replica() == [ReplicaPace(3.0, 1.0), ReplicaPace(4.0, 2.0)]
    paces.observe([StageReport(0, 9.0, Breakdown(9.0, 1.0), Peaks(), microbatches=2, size=4.0)] * 4)
    assert (paces.are_sized, paces.by_replica()) == (True, None)  # of another unit


def test_a_rank_that_is_given_nothing_counts_as_quicker_with_each_step_until_it_runs_something() -> None:
    paces = Paces([0, 1])

    def observe(counts: list[int], size: float = 0.0) -> None:
        seconds = 9.0, 1.0
        paces.observe(
            [
                StageReport(0, 9.0, Breakdown(9.0, each * count), Peaks(), microbatches=count, size=size * count)
                for each, count in zip(seconds, counts, strict=True)
            ]
        )

    for size in (0.0, 1.0):
        for _ in range(FEW):
            observe([1, 1], size)
        assert paces.of([0, 1]) == (9.0, 1.0)
        for idle in range(1, 20):
            observe([0, 2], size)
            assert paces.of([0, 1]) == pytest.approx((9.0 * 0.8**idle, 1.0))
            assert paces.are_sized == (size > 0)
        observe([1, 1], size)
        assert paces.of([0, 1]) == (9.0, 1.0)


@pytest.mark.parametrize(
    "share", [GivenShare(0), GivenShare(2, (1.0,)), GivenShare(2, (1.0, 1.0), (1.0,) * 3)], ids=repr
)
def test_a_rank_has_sizes_and_weights_of_all_its_microbatches_or_of_none(share: GivenShare) -> None:
    with pytest.raises(ProtocolError, match=r"^rank 1 sent sizes or weights .* that it has$"):
        share.check("rank 1")
    GivenShare(2, (1.0, 1.0)).check("rank 1")


def test_evaluations_run_where_they_are() -> None:
    def body(rank: int, pipe: BlockingPipeline) -> list[Any]:
        trained = steps(rank, pipe)
        evaluated = pipe.evaluate(**{**batch_of(rank, STEPS), "weights": None})
        return [*trained, evaluated, pipe.step(**batch_of(rank, STEPS + 1))]

    for rank, outcome in enumerate(run(programs(), body).join()):
        *_, evaluated, last = outcome.value
        assert evaluated.dealt == ()
        assert evaluated.losses == pytest.approx(losses_of(MESH.place_of(rank).replica, STEPS))
        assert sum(last.dealt) == sum(GIVEN)


def test_the_random_numbers_of_a_microbatch_are_those_of_its_home() -> None:
    ranks = programs()
    run(ranks, steps).join()
    for program in ranks:
        for batch in program.reopened:
            count, replica = len(batch.gradient_weights), program.place.replica
            own = [m for m in range(count) if batch.homes[m] == (replica_seed(0, replica), m)]
            foreign = [batch.homes[m] for m in range(len(own), count)]
            assert own == list(range(min(count, GIVEN[replica])))
            assert bool(foreign) == (replica == 1)
            assert foreign == [(replica_seed(0, 0), m) for m in range(GIVEN[0] - len(foreign), GIVEN[0])]


def test_each_caller_scales_the_gradients_of_its_own_microbatches() -> None:
    def body(rank: int, pipe: BlockingPipeline) -> None:
        for number in range(STEPS):
            pipe.step(**batch_of(rank, number), grad_scale=1.0 + MESH.place_of(rank).replica)

    ranks = programs()
    run(ranks, body).join()
    total = sum(sum(1.0 + m for m in range(count)) for count in GIVEN)
    for batch in (batch for rank in (2, 3) for batch in ranks[rank].reopened):
        for m, factor in enumerate(batch.gradient_weights):
            seed, home = batch.homes[m]
            assert factor == (1.0 + home) / total * (1.0 if seed == replica_seed(0, 0) else 2.0)


def test_with_sizes_each_replica_runs_as_much_whatever_the_number() -> None:
    sizes = ([6, 1, 1, 6, 6, 1, 1, 6], [1, 2, 1, 1, 2, 1])

    def body(rank: int, pipe: BlockingPipeline) -> list[rrfp.StepResult]:
        own = sizes[MESH.place_of(rank).replica]
        return [pipe.step(**batch_of(rank, number, own), sizes=own) for number in range(STEPS)]

    ranks = programs(LONG_S, LONG_S)
    results = [outcome.value for outcome in run(ranks, body).join()]
    for rank, own in enumerate(results):
        replica = MESH.place_of(rank).replica
        for number, result in enumerate(own):
            assert result.losses == pytest.approx(losses_of(replica, number))
            assert result.loss == pytest.approx(mean(number))
    ran = {program.place.replica: sum(program.sizes.values()) for program in ranks}
    assert sum(ran.values()) == sum(map(sum, sizes))
    assert max(ran.values()) < 0.8 * sum(sizes[0])


def test_where_some_ranks_of_a_replica_lack_sizes_microbatches_count_the_same() -> None:
    def body(rank: int, pipe: BlockingPipeline) -> list[rrfp.StepResult]:
        stage, replica, _ = MESH.place_of(rank)
        sizes = None if stage else [1.0] * GIVEN[replica]
        return [pipe.step(**batch_of(rank, number), sizes=sizes) for number in range(STEPS)]

    for outcome in run(programs(), body).join():
        slow, quick = outcome.value[-1].dealt
        assert slow + quick == sum(GIVEN)
        assert slow < GIVEN[0]


class Takes(Counts):
    """Notes what another caller has passed."""

    def __init__(self, rank: int, seconds: float) -> None:
        super().__init__(rank, seconds)
        self.taken: list[weakref.ref[torch.Tensor]] = []

    def forward(self, task: rrfp.Task, inputs: tuple[rrfp.Payload, ...]) -> rrfp.Payload:
        seed, _ = self._batch.homes.get(task.microbatch, (None, 0))
        if seed == replica_seed(0, 1 - self.place.replica):
            passed = self._batch.targets if self.place.stage else self._batch.inputs
            self.taken.append(weakref.ref(passed[task.microbatch]))
        return super().forward(task, inputs)


def test_what_another_caller_passed_is_forgotten_at_the_end_of_the_step() -> None:
    ranks = [Takes(rank, program.seconds) for rank, program in enumerate(programs())]

    def body(rank: int, pipe: BlockingPipeline) -> int:
        for number in range(STEPS):
            pipe.step(**batch_of(rank, number))
            assert [taken() for taken in ranks[rank].taken] == [None] * len(ranks[rank].taken)
        return len(ranks[rank].taken)

    assert sum(outcome.value for outcome in run(ranks, body).join()) > STEPS - FEW


def test_a_task_that_fails_is_named_with_its_own_callers_number() -> None:
    class Fails(Counts):
        def forward(self, task: rrfp.Task, inputs: tuple[rrfp.Payload, ...]) -> rrfp.Payload:
            if task.microbatch >= GIVEN[1]:
                raise ValueError("enough")
            return super().forward(task, inputs)

    failing = Fails(3)
    for abort in aborted(run([*programs()[:3], failing], steps).join()):
        assert abort.origin.task is not None
        forward, home = abort.origin.task.split(" ", 1)
        _, number = failing.reopened[-1].homes[rrfp.Task.parse(forward).microbatch]
        assert home == f"(microbatch {number} of replica 0)"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({1: torch.ones(1, requires_grad=True)}, "microbatch 1 has a tensor that requires grad, must have none"),
        ({0: object()}, "microbatch 0['inputs'] is of type object"),
    ],
)
def test_what_cannot_move_ends_the_first_step_on_all_ranks(bad: dict[int, Any], reason: str) -> None:
    def body(rank: int, pipe: BlockingPipeline) -> Any:
        own = batch_of(rank, 0)
        for m, value in bad.items() if rank == 1 else ():
            own["inputs"][m] = value
        return pipe.step(**own)

    for abort in aborted(run([Counts(rank) for rank in range(4)], body).join()):
        assert reason in str(abort)
        assert abort.origin.rank == 1


def test_ranks_of_a_replica_must_have_as_many_microbatches() -> None:
    def body(rank: int, pipe: BlockingPipeline) -> Any:
        steps(rank, pipe)
        own = batch_of(rank, STEPS)
        return pipe.step(**{name: values[: 5 if rank == SLOW else None] for name, values in own.items()})

    for abort in aborted(run(programs(), body).join()):
        assert "the number of microbatches is 5 on stage 1, dp 0 (rank 2), must be 8" in str(abort)


def test_a_rank_that_fails_where_it_takes_microbatches_is_named_on_all() -> None:
    class Refuses(Counts):
        def reopen(self, step: Any, batch: rrfp.Batch) -> None:
            raise ValueError("enough")

    for abort in aborted(run([*programs()[:3], Refuses(3)], steps).join()):
        assert "enough" in str(abort)
        assert abort.origin.rank == 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"share_replicas": "all"}, "share_replicas is 'all', must be False, True or 'dealt'"),
        ({"deterministic": True}, "deterministic is True, must be False with share_replicas"),
        ({"replay": "logs"}, "replay is set, must be None with share_replicas"),
        ({"hint": ScheduleHint(lambda view: Schedule("mine", ()))}, "ScheduleHint, the schedule of a certain step"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        complete({"share_replicas": "dealt", **options})  # type: ignore[typeddict-item]


def test_groups_and_graphs_are_refused() -> None:
    groups = Mesh((("pp", 2), ("tp", 2), ("dp", 2)))
    with pytest.raises(ConfigError, match="must be False where a group has 2 ranks"):
        rrfp.Pipeline(Counts(0), topology=rrfp.Topology.at(0, groups), share_replicas="dealt", loss_fn=None)
    graph = rrfp.Graph()
    graph.part("model", stages=[0, 1])
    modules: Any = [{"model": torch.nn.Linear(2, 2)} for _ in range(2)]
    with pytest.raises(ConfigError, match="must be False for a graph of parts"):
        rrfp.local(modules, graph=graph, loss_fn=loss_fn, share_replicas="dealt")


@pytest.mark.slow
def test_gradients_and_losses_are_those_without_it(tmp_path: Path) -> None:
    """With chunks, a split backward, weights, dropout and ragged microbatches, accumulated over steps."""
    case = "gradients_of_a_shared_step_are_the_references"
    found = outcomes("runtime.shared_cases", [case], 4, tmp_path)[case]
    assert found == [GOOD] * 4, "\n".join(found)
