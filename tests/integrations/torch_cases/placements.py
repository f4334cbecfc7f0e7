"""Where stages lie: one or several a rank, looped or in a V, listed in any order."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from integrations.torch_parts import CPU, WIDTH, Block, Rank, Reference, batch, blocks, loss_fn, only
from torch import nn
from torch.distributed.pipelining import PipelineStage

from rrfp.integrations.torch import ScheduleRRFP


def one_stage_a_rank() -> None:
    """Shapes are inferred at the first step."""
    rank = Rank(1, 4)
    rank.steps(3)
    rank.schedule.close()


def shapes_given_at_construction() -> None:
    """Static mode: no stage runs before the first step."""
    example = torch.zeros(2, 3, WIDTH)
    calls: list[int] = []

    def make() -> nn.Module:
        module = Block()
        module.register_forward_hook(lambda *_: calls.append(1))
        return module

    def shapes(v: int) -> dict[str, Any]:
        return {
            "input_args": (example.clone().requires_grad_(v > 0),),
            "output_args": (example.clone().requires_grad_(),),
        }

    rank = Rank(1, 4, make=make, stage_options=shapes)
    x, y = batch(0, 8)
    args, kwargs = rank.arguments(x, y, [])
    rank.schedule.step(*args, **kwargs)
    assert len(calls) == 4
    rank.reference.run(((part,) for part in x.chunk(4)), y.chunk(4))
    assert rank.error() < 1e-12
    rank.schedule.close()


def one_microbatch() -> None:
    rank = Rank(2, 1)
    rank.steps(2)
    rank.schedule.close()


def fewer_microbatches_than_stages() -> None:
    rank = Rank(2, 3)
    rank.steps(1)
    rank.schedule.close()


def looped() -> None:
    rank = Rank(2, 5)
    assert rank.schedule.stage_index_to_group_rank == {v: v % dist.get_world_size() for v in range(rank.virtual)}
    rank.steps(2)
    rank.schedule.close()


def unequally_many() -> None:
    """The first rank has the ends, and stages that follow each other; others have two."""
    ranks = dist.get_world_size()
    table = [0, 0, *(rank for rank in range(1, ranks) for _ in range(2)), 0]
    for split in (False, True):
        rank = Rank(table=table, microbatches=5, split=split)
        assert rank.schedule.stage_index_to_group_rank == dict(enumerate(table))
        rank.steps(2)
        rank.schedule.close()


def in_no_named_order() -> None:
    """As many on every rank, one after the other."""
    table = [rank for rank in range(dist.get_world_size()) for _ in range(2)]
    rank = Rank(table=table, microbatches=4)
    rank.steps(2)
    rank.schedule.close()


def looped_split() -> None:
    rank = Rank(2, 5, split=True)
    rank.steps(2)
    result = rank.schedule.last_result
    assert result is not None
    assert {span.task.kind.name for span in result.trace.tasks} == {"F", "B", "W"}
    rank.schedule.close()


def vee() -> None:
    rank = Rank(2, 6, vee=True)
    rank.steps(2)
    rank.schedule.close()


def vee_split() -> None:
    rank = Rank(2, 6, vee=True, split=True, hint="bfw")
    rank.steps(2)
    rank.schedule.close()


def three_chunks_in_a_vee() -> None:
    rank = Rank(3, 4, vee=True)
    rank.steps(1)
    rank.schedule.close()


def twenty_steps() -> None:
    rank = Rank(1, 4)
    rank.steps(20)
    rank.schedule.close()


def stages_in_any_order() -> None:
    """A rank may list its stages as it likes."""
    ranks = dist.get_world_size()
    modules, reference = blocks(2 * ranks), Reference(blocks(2 * ranks))
    mine = [dist.get_rank() + ranks, dist.get_rank()]
    stages = [PipelineStage(modules[v], v, 2 * ranks, CPU) for v in mine]
    schedule = ScheduleRRFP(stages, 2, loss_fn)
    x, y = batch(0, 4)
    schedule.step(*((x,) if dist.get_rank() == 0 else ()), **only(2 * ranks - 1 in mine, target=y))
    reference.run(((part,) for part in x.chunk(2)), y.chunk(2))
    for v in mine:
        for own, other in zip(modules[v].parameters(), reference.modules[v].parameters(), strict=True):
            assert own.grad is not None
            assert other.grad is not None
            assert torch.allclose(own.grad, other.grad, rtol=0, atol=1e-12)
    schedule.close()


def the_printed_order_is_a_valid_one() -> None:
    """torch's own check and simulator take the nominal order, which no rank follows."""
    from torch.distributed.pipelining import schedules

    for lies_in_a_vee in (False, True):
        rank = Rank(2, 3, vee=lies_in_a_vee)
        order = rank.schedule.pipeline_order
        mapping = schedules._validate_schedule(order, dist.get_world_size(), rank.virtual, 3)
        assert mapping == rank.schedule.stage_index_to_group_rank
        with_comms = schedules._add_send_recv(
            {r: [a for a in actions if a is not None] for r, actions in order.items()},
            stage_to_rank=mapping.__getitem__,
            num_stages=rank.virtual,
        )
        assert sorted(with_comms) == list(range(dist.get_world_size()))
        rank.schedule.close()
