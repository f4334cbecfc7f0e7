"""Copies of batches between replicas, on ranks without a pipeline: what is kept, until when, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from runtime.copying_ranks import MESH, Rank, plan_of, ranks
from torch import Tensor

from rrfp import Topology
from rrfp.errors import ProtocolError, StageError
from rrfp.model.graph import TaskGraph
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import F, Task
from rrfp.runtime.control_tree import held_by, holder_of, peers
from rrfp.runtime.steps.plan import StepPlan


async def arrived(rank: Rank, number: int) -> Any:
    """The whole copy of a step."""
    async with asyncio.timeout(10):
        while (batch := rank.copies.held(number)) is None:  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0.001)
    return batch


def batch(count: int, seed: int = 0) -> list[Tensor]:
    return [torch.arange(3) + 3 * m + 100 * seed for m in range(count)]


@pytest.mark.parametrize("replicas", range(2, 9))
def test_each_replica_keeps_the_copies_of_one_other(replicas: int) -> None:
    holders = [holder_of(replica, replicas) for replica in range(replicas)]
    assert sorted(holders) == [*range(replicas)]
    assert all(held_by(holder, replicas) == replica != holder for replica, holder in enumerate(holders))
    if replicas > 3:
        assert all((holder - replica) % replicas not in (1, replicas - 1) for replica, holder in enumerate(holders))


def test_who_keeps_copies_is_connected() -> None:
    mesh = Mesh((("pp", 2), ("dp", 5)))
    for rank in range(10):
        topology = Topology.at(rank, mesh)
        partners = {topology.rank_of(topology.stage, each(topology.replica, 5)) for each in (holder_of, held_by)}
        found = {copies: peers(TaskGraph.chain(2), topology, copies=copies) for copies in (False, True)}
        assert set(found[True]) == {*found[False], *partners}


async def test_a_copy_has_what_the_caller_passed_as_far_as_the_rank_uses_it() -> None:
    given: list[dict[str, Any]] = [
        {"inputs": batch(3), "targets": batch(3, 1), "kwargs": [{"mask": each} for each in batch(3, 2)]},
        {"inputs": batch(3), "targets": batch(3, 1)},
        {"inputs": batch(3), "targets": batch(3, 1), "weights": [1, 2.5, 0], "sizes": [3, 1, 2], "grad_scale": 0.5},
    ]
    async with ranks(0, 1, 2, 3, 4, 5) as made:
        for rank in made:
            place = MESH.place_of(made.index(rank))
            rank.begin(plan_of(0, 3, **given[place.stage]))
        for rank in made:
            await rank.end()
        for number, rank in enumerate(made):
            stage, replica, _ = MESH.place_of(number)
            found = await arrived(rank, 0)
            assert (found.replica, found.microbatches) == (1 - replica, 3)
            wanted = {"inputs": stage == 0, "targets": stage == 2, "kwargs": stage == 0}
            for name, is_there in wanted.items():
                assert equal(getattr(found, name), given[stage][name] if is_there else None), (number, name)
            last = stage == 2
            assert found.weights == ((1.0, 2.5, 0.0) if last else None)
            assert found.sizes == ((3.0, 1.0, 2.0) if last else None)
            assert found.grad_scale == (0.5 if last else 1.0)
        assert not any(rank.failures for rank in made)


def equal(left: Any, right: Any) -> bool:
    if isinstance(right, Tensor):
        return isinstance(left, Tensor) and torch.equal(left, right)
    if isinstance(right, Mapping):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in right)
    if isinstance(right, Sequence):
        return len(left) == len(right) and all(map(equal, left, right))
    return left is right


async def test_a_copy_is_kept_until_the_next_step_begins_and_may_come_before_its_own() -> None:
    async with ranks(0, 1) as (early, late):
        for number in range(2):  # the other one has not begun the second
            early.begin(plan_of(number, 2, inputs=batch(2, number)))
            if number == 0:
                late.begin(plan_of(0, 2, inputs=batch(2)))
                await asyncio.gather(early.end(), late.end())
                assert equal((await arrived(early, 0)).inputs, batch(2))
        assert equal((await arrived(late, 1)).inputs, batch(2, 1))
        assert equal((await arrived(late, 0)).inputs, batch(2))
        late.begin(plan_of(1, 2, inputs=batch(2)))
        assert late.copies.held(0) is None
        assert equal((await arrived(late, 1)).inputs, batch(2, 1))
        await asyncio.gather(early.end(), late.end())


async def test_a_copy_that_reports_have_overtaken_is_dropped() -> None:
    async with ranks(1) as (holder,):
        plan = plan_of(0, 2)
        holder.begin(plan)
        holder.receive(0, plan, Task(F, 0, 0))
        holder.context.activity.end_step()
        holder.receive(0, plan, Task(F, 1, 0))
        assert holder.copies.is_held(0)
        holder.begin(plan_of(1, 2))
        holder.receive(0, plan, Task(F, 1, 0))
        assert not holder.copies.is_held(0)


async def test_a_copy_has_memory_of_its_own() -> None:
    async with ranks(0, 1) as (sender, holder):
        for rank in (sender, holder):
            rank.begin(plan_of(0, 2, inputs=batch(2)))
        await asyncio.gather(sender.end(), holder.end())
        first = await arrived(holder, 0)
        first.inputs[0].zero_()
        assert equal((await arrived(holder, 0)).inputs, batch(2))


async def test_a_part_of_a_batch_is_no_copy() -> None:
    async with ranks(1) as (holder,):
        plan = plan_of(0, 2)
        holder.begin(plan)
        assert holder.copies.held(0) is None
        for m in (1, 0):
            assert holder.copies.held(0) is None
            holder.receive(0, plan, Task(F, m, 0))
        found = holder.copies.held(0)
        assert found is not None
        assert (found.inputs, found.grad_scale) == (None, 1.0)


async def test_a_task_that_writes_into_the_batch_is_refused_and_the_copy_is_what_was_passed() -> None:
    async with ranks(0, 1) as (sender, holder):
        inputs = batch(2)
        sender.begin(plan_of(0, 2, inputs=inputs))
        copy = await arrived_at(holder, sender)
        assert sender.copies.written() is None
        inputs[1].add_(1)
        problem = "wrote into a tensor that was passed for microbatch 1, or that shares its memory, must not with"
        assert problem in str(sender.copies.written())
        with pytest.raises(StageError, match=problem):
            await sender.copies.settle()
        assert equal(copy.inputs, batch(2))
        assert equal((await arrived(holder, 0)).inputs, batch(2))


async def arrived_at(holder: Rank, sender: Rank) -> Any:
    holder.context.activity.begin_step(plan_of(0, 2).step)
    return await arrived(holder, 0)


async def test_the_first_copies_are_no_memory_of_the_caller_and_later_ones_are() -> None:
    """Within a process the transport copies once; so the memory is counted by writing while a message waits."""
    async with ranks(0, 1) as (sender, holder):
        for number in range(2):
            inputs = batch(2, number)
            plan = plan_of(number, 2, inputs=inputs)
            packed = [payload for payload, _ in sender.copies._packed(plan)]
            sent = [tensor for payload in packed for tensor in payload.tensors if tensor is not None]
            is_own = [tensor.data_ptr() == x.data_ptr() for tensor, x in zip(sent, inputs, strict=True)]
            assert is_own == [number == 1] * 2
            for rank in (sender, holder):
                rank.begin(plan)
            await asyncio.gather(sender.end(), holder.end())


async def test_what_cannot_travel_ends_the_step() -> None:
    for bad, reason in [
        (
            torch.ones(1, requires_grad=True),
            "microbatch 1 has a tensor that requires grad, must have none with",
        ),
        (object(), r"microbatch 1\['inputs'\] is of type object"),
    ]:
        async with ranks(0, 1) as (sender, _):
            sender.begin(plan_of(0, 2, inputs=[torch.ones(1), bad]))
            async with asyncio.timeout(10):
                while not sender.failures:  # noqa: ASYNC110 - no event says so
                    await asyncio.sleep(0.001)
            with pytest.raises(StageError, match=reason):
                raise sender.failures[0]


async def test_copies_that_make_no_sense_are_refused() -> None:
    async with ranks(1) as (holder,):
        plan, task = plan_of(0, 2), Task(F, 0, 0)
        holder.begin(plan)
        holder.receive(0, plan, task)
        refused: list[tuple[int, StepPlan, Task | None, str]] = [
            (3, plan, None, "rank 3 sent 'copy', but this rank keeps no copies of it"),
            (0, plan_of(2, 2), None, "step 0 is next or running"),
            (0, plan, task, "sent the copy of microbatch 0 twice, or there is none"),
            (0, plan, Task(F, 2, 0), "sent the copy of microbatch 2 twice, or there is none"),
            (0, plan_of(0, 3), Task(F, 1, 0), "more copies for .* than it has microbatches"),
        ]
        for sender, other, which, reason in refused:
            with pytest.raises(ProtocolError, match=reason):
                holder.receive(sender, other, which)
        with pytest.raises(ProtocolError, match="without the structure of its tensors"):
            holder.receive(0, plan, Task(F, 1, 0), structure=3)
        holder.receive(0, plan, Task(F, 1, 0))
        with pytest.raises(ProtocolError, match="more copies for"):
            holder.receive(0, plan, None)
