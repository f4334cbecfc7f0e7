"""Groups and replicas in threads: one order, results, limits; and what their ranks must have in common."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from runtime.group_programs import MESH, NAMES, Program, programs, steps
from runtime.ranks import ThreadedRanks
from runtime.toys import stages

import rrfp
from rrfp import View
from rrfp.compute.lanes.thread import ThreadLane
from rrfp.core.ready_set import ReadySet
from rrfp.errors import ConfigError
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import Task
from rrfp.pipeline.faces import BlockingPipeline


@pytest.mark.parametrize("coordination", ["leader", "agreement"])
@pytest.mark.parametrize("depth", [None, 1, 3])
def test_the_ranks_of_a_group_run_one_order(coordination: str, depth: int | None) -> None:
    parts = programs()
    outcomes = ThreadedRanks(
        parts, steps(3), mesh=MESH, coordination=coordination, depth=depth, hint="bf", limit=2
    ).join()
    for outcome in outcomes:
        assert outcome.error is None
        assert replace(outcome.value, trace=None) == replace(outcomes[0].value, trace=None)
        assert max(outcome.value.peak_held) <= 2
    for stage in range(2):
        assert parts[2 * stage].ran == parts[2 * stage + 1].ran
        assert len(parts[2 * stage].ran) == 3 * 8


def test_the_result_has_the_losses_of_the_replica_and_the_loss_of_all() -> None:
    """Replica 0 has microbatches of weights 1 and 3, replica 1 three of weight 2; a group's leader tells its losses."""
    mesh = Mesh((("dp", 2), ("pp", 2), ("tp", 2)))

    def body(rank: int, pipe: BlockingPipeline) -> Any:
        return pipe.step(weights=[1, 3] if mesh.place_of(rank).replica == 0 else [2, 2, 2])

    outcomes = ThreadedRanks(programs(mesh), body, mesh=mesh).join()
    assert [outcome.error for outcome in outcomes] == [None] * 8
    losses = [[1.0 + leader + m for m in range(count)] for leader, count in ((2, 2), (6, 3))]
    expected = (losses[0][0] + 3 * losses[0][1] + 2 * sum(losses[1])) / 10
    for rank, outcome in enumerate(outcomes):
        assert outcome.value.loss == pytest.approx(expected)
        assert list(outcome.value.losses) == losses[mesh.place_of(rank).replica]
        assert len(outcome.value.peaks) == len(outcome.value.breakdown) == 2


def test_a_sum_of_losses_is_over_all_replicas_and_no_members() -> None:
    mesh = Mesh((("pp", 1), ("dp", 2), ("tp", 2)))
    outcomes = ThreadedRanks(
        programs(mesh), lambda rank, pipe: pipe.step(weights=[1, 2]), mesh=mesh, reduction="sum"
    ).join()
    assert {outcome.value.loss for outcome in outcomes} == {(1 + 2 * 2) + (3 + 2 * 4)}


def test_replicas_may_evaluate_other_numbers_of_microbatches_or_nothing_that_counts() -> None:
    """As at the padded end of a data set."""
    mesh = Mesh((("pp", 1), ("dp", 2)))

    def body(rank: int, pipe: BlockingPipeline) -> Any:
        return [pipe.evaluate(weights=[1, 1] if rank == 0 else [0]), pipe.evaluate(weights=[0])]

    for outcome in ThreadedRanks(programs(mesh), body, mesh=mesh).join():
        assert outcome.error is None
        counted, nothing = outcome.value
        assert counted.loss == 1.5
        assert math.isnan(nothing.loss)


def test_weights_that_the_rank_of_the_losses_lacks_are_refused_on_all_ranks() -> None:
    mesh = Mesh((("dp", 2), ("pp", 2)))

    def body(having: int) -> Callable[[int, BlockingPipeline], Any]:
        return lambda rank, pipe: pipe.step(microbatches=2, weights=[1, 3] if rank == having else None)

    for having, is_refused in ((1, False), (2, True)):
        outcomes = ThreadedRanks(programs(mesh), body(having), mesh=mesh).join()
        first, last = mesh.name(2), mesh.name(3)
        text = f"weights is passed on {first} and not on {last}, which computes the losses: must be passed there"
        assert [text in str(outcome.error) for outcome in outcomes] == [is_refused] * 4


@pytest.mark.parametrize("coordination", ["leader", "agreement"])
@pytest.mark.parametrize("method", [{"strict": "1f1b"}, {"hint": "1f1b", "limit": "1f1b"}, {"strict": "gpipe"}])
def test_schedules_and_forward_only_steps_run_in_groups(coordination: str, method: Mapping[str, Any]) -> None:
    def body(rank: int, pipe: BlockingPipeline) -> Any:
        return [pipe.step(microbatches=4), pipe.evaluate(microbatches=3), pipe.step(microbatches=2)]

    parts = programs()
    outcomes = ThreadedRanks(parts, body, mesh=MESH, coordination=coordination, **method).join()
    assert [outcome.error for outcome in outcomes] == [None] * 4
    for stage in range(2):
        assert parts[2 * stage].ran == parts[2 * stage + 1].ran
        assert len(parts[2 * stage].ran) == 8 + 3 + 4


class Holding(Program):
    """Between forward and backward a microbatch holds some bytes, and ``most`` says how many at once.

    Args:
        rank: which.
        num_bytes: how many.
    """

    def __init__(self, rank: int, num_bytes: int) -> None:
        super().__init__(rank, self._check, rank >= 2)
        self.most = 0
        self._num_bytes = num_bytes
        self._holders: set[int] = set()

    def held_bytes(self, microbatch: int, virtual_stage: int) -> int:
        return self._num_bytes * (microbatch in self._holders)

    def _check(self, task: Task) -> None:
        (self._holders.add if task.kind is rrfp.Kind.F else self._holders.discard)(task.microbatch)
        self.most = max(self.most, self._num_bytes * len(self._holders))


@pytest.mark.parametrize("worst", range(4))
def test_a_limit_on_bytes_counts_the_rank_that_holds_the_most(worst: int) -> None:
    """With room for two microbatches there; on the other ranks of its group alone 8 would fit."""
    parts = [Holding(rank, 100 if rank == worst else 10) for rank in range(4)]
    limit, one = rrfp.Limit(bytes=250), lambda rank, pipe: pipe.step(microbatches=8)
    outcomes = ThreadedRanks(parts, one, mesh=MESH, hint="f-priority", limit=limit).join()
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert parts[worst].most == 200 if worst < 2 else parts[worst].most in (100, 200)
    for outcome in outcomes:
        # What the result tells is what a rank held, and not what the leader counted: outputs on their way add a little.
        assert parts[worst].most <= outcome.value.peak_bytes[worst // 2] <= 250


def test_agreement_with_a_limit_on_bytes_is_refused_because_ranks_that_differ_would_never_agree() -> None:
    limit = rrfp.Limit(bytes=250)
    for outcome in ThreadedRanks(programs(), steps(1), mesh=MESH, coordination="agreement", limit=limit).join():
        assert type(outcome.error) is ConfigError
        assert str(outcome.error) == (
            "limit: bytes is 250, must be None with coordination 'agreement': ranks of a group that hold different "
            "amounts would never agree; the leader (coordination 'leader') counts the worst of them"
        )


class Other(rrfp.Hint):
    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return next(iter(ready))


@pytest.mark.parametrize(
    ("field", "odd", "text"),
    [
        ("limit", 3, "on {2} and \"Limit(microbatches=7, bytes=None, rule='staircase')\" on {3}: must be the same on"),
        ("depth", 1, "depth is None on {0} and 3 on {1}"),
        ("hint", 3, "on {0} and '{other}' on {3}: must be the same on all ranks"),
        ("coordination", 2, "coordination is 'leader' on {0} and 'agreement' on {2}: must be the same on all ranks"),
        ("seed", 3, "seed is 0 on {0} and 3 on {3}: must be the same on all ranks"),
        ("topology", 1, "mesh is 'pp 2, tp 2' on {0} and 'tp 2, pp 2' on {1}: must be the same on all ranks"),
    ],
)
def test_a_rank_that_differs_is_one_error_on_all_that_names_both(field: str, odd: int, text: str) -> None:
    values = {
        "limit": 7,
        "depth": 3,
        "hint": Other,
        "coordination": "agreement",
        "seed": 3,
        "topology": rrfp.Topology.at(odd, Mesh((("tp", 2), ("pp", 2)))),
    }
    ranks = ThreadedRanks(programs(), steps(1), {odd: {field: values[field]}}, MESH, limit=2)
    errors = [outcome.error for outcome in ranks.join()]
    assert {type(error) for error in errors} == {ConfigError}
    (told,) = {str(error) for error in errors}
    assert "\n" not in told
    wanted = text.replace("{other}", f"{Other.__module__}.Other")
    for rank, name in enumerate(NAMES):
        wanted = wanted.replace(f"{{{rank}}}", name)
    assert wanted in told


def test_members_whose_modules_force_different_orders_are_refused() -> None:
    """Only one of them writes buffers in forward."""
    modules = stages(4)
    modules[3] = torch.nn.Sequential(modules[3], torch.nn.BatchNorm1d(6).double())
    ranks = ThreadedRanks(modules, steps(1), mesh=MESH, deterministic=True)
    (told,) = {str(outcome.error) for outcome in ranks.join() if type(outcome.error) is ConfigError}
    assert told == f"in_order is 'B@0 B@1' on {NAMES[2]} and 'B@0 B@1 F@1' on {NAMES[3]}: must be the same on " + (
        "the ranks of a group"
    )


def test_groups_may_differ_in_what_only_a_group_has_in_common() -> None:
    own = {rank: {"limit": 3, "depth": 2} for rank in (2, 3)}
    assert [o.error for o in ThreadedRanks(programs(), steps(2), own, MESH, limit=4).join()] == [None] * 4


class Counted(ThreadLane):
    """Sets ``second`` when a call is enqueued while another one has not ended."""

    def __init__(self) -> None:
        super().__init__()
        self.second = threading.Event()
        self._unfinished = 0

    def enqueue(self, call: Any) -> Any:
        done = super().enqueue(call)
        self._unfinished += 1
        if self._unfinished > 1:
            self.second.set()
        done.add_done_callback(self._ended)
        return done

    def _ended(self, _: object) -> None:
        self._unfinished -= 1


def test_ranks_under_a_leader_have_their_next_task_enqueued_behind_the_running_one() -> None:
    """By default, on a lane that runs one at a time."""
    mesh = Mesh((("pp", 1), ("tp", 2)))
    lanes = [Counted(), Counted()]

    def wait_for_the_next(lane: Counted) -> Callable[[Task], object]:
        return lambda task: task.microbatch > 0 or lane.second.wait(10) or pytest.fail("nothing was enqueued behind it")

    checks = {rank: wait_for_the_next(lane) for rank, lane in enumerate(lanes)}
    own = {rank: {"lane": lambda stage, lane=lane: lane} for rank, lane in enumerate(lanes)}
    outcomes = ThreadedRanks(programs(mesh, checks), steps(1), own, mesh=mesh, hint="f-priority", limit=4).join()
    assert [outcome.error for outcome in outcomes] == [None, None]
