"""Arguments of a schedule, of its steps and of its evaluations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from integrations.torch_parts import CPU, WIDTH, Block, Rank, batch, blocks, loss_fn, only
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from rrfp.integrations.torch import ScheduleRRFP


def forward_only() -> None:
    """Without a loss there is no backward, and the outputs come back in the order of microbatches."""
    rank = Rank(2, 4, loss=None)
    for number in range(3):
        x, y = batch(number, 8)
        output = rank.schedule.step(*((x,) if rank.is_first else ()))
        rank.reference.run(((part,) for part in x.chunk(4)), y.chunk(4))
        if rank.is_last:
            assert torch.equal(output, torch.cat(rank.reference.outputs))
        else:
            assert output is None
    assert all(parameter.grad is None for module in rank.modules.values() for parameter in module.parameters())
    rank.schedule.close()


class Normed(Block):
    """Writes running statistics in every forward of training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(self.norm(x), scale)


def statistics_are_those_of_the_microbatches() -> None:
    """torch calls each module once more before the first step, on later ranks with whatever lies in memory."""
    rank = Rank(2, 4, make=Normed)
    rank.steps(2)
    for v, module in rank.modules.items():
        for own, other in zip(module.buffers(), rank.reference.modules[v].buffers(), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-12, atol=0)
    rank.schedule.close()


def evaluations_between_steps() -> None:
    """With targets and without, in the grad mode and out of it, before the first step and after."""
    rank = Rank(2, 3)
    x, y = batch(0, 6)
    rank.reference.run(((part,) for part in x.chunk(3)), y.chunk(3))
    for is_trained in (False, True):
        if is_trained:
            rank.zero_grad()
            rank.steps(1)
        for grad_mode in (torch.enable_grad, torch.no_grad):
            with grad_mode():
                losses: list[Any] = []
                args, kwargs = rank.arguments(x, y, losses)
                output = rank.schedule.eval(*args, **kwargs)
                alone = rank.schedule.eval(*args)
            if rank.is_last:
                assert torch.equal(output, torch.cat(rank.reference.outputs))
                assert torch.equal(alone, output)
                assert not output.requires_grad
                assert [loss.item() for loss in losses] == [loss.item() for loss in rank.reference.losses]
            else:
                assert output is None
        assert all(p.grad is None for module in rank.modules.values() for p in module.parameters())
    rank.steps(1)
    rank.schedule.close()


def batches_cut_by_the_caller() -> None:
    """Microbatches of different shapes, with keywords on every rank; a second step has other shapes."""
    rank = Rank(2, 4)
    generator = torch.Generator().manual_seed(5)
    for lengths in ((2, 5, 1, 3), (4, 4, 2, 1)):
        inputs = [torch.randn(2, length, WIDTH, generator=generator) for length in lengths]
        targets = [torch.randn(2, length, WIDTH, generator=generator) for length in lengths]
        scales = [{"scale": torch.rand(2, length, 1, generator=generator)} for length in lengths]
        losses: list[Any] = []
        given: dict[str, Any] = {"kwarg_mbs": scales}
        if rank.is_first:
            given["arg_mbs"] = [(x,) for x in inputs]
        if rank.is_last:
            given.update(target_mbs=targets, losses=losses)
        output = rank.schedule.step(**given, return_outputs=False)
        rank.reference.run(((x,) for x in inputs), targets, kwargs=scales)
        assert output is None
        assert rank.error() < 1e-12
        if rank.is_last:
            assert [loss.item() for loss in losses] == [loss.item() for loss in rank.reference.losses]
        losses.clear()
        rank.schedule.eval(**given, return_outputs=False)
        if rank.is_last:
            with pytest.raises(ValueError, match="pass return_outputs=False"):
                rank.schedule.eval(**given)
        else:
            rank.schedule.eval(**given)
        if rank.is_last:
            assert [loss.item() for loss in losses] == [loss.item() for loss in rank.reference.losses]
        rank.zero_grad()
    rank.schedule.close()


def keywords_of_a_whole_batch() -> None:
    rank = Rank(1, 4)
    x, y = batch(0, 8)
    scale = torch.rand(8, 1, 1, generator=torch.Generator().manual_seed(3))
    args, kwargs = rank.arguments(x, y, [])
    rank.schedule.step(*args, **kwargs, scale=scale)
    rank.reference.run(((p,) for p in x.chunk(4)), y.chunk(4), kwargs=[{"scale": part} for part in scale.chunk(4)])
    assert rank.error() < 1e-12
    rank.schedule.close()


def loss_keywords_outputs_and_scaling() -> None:
    """``loss_kwargs`` reach the loss, ``return_outputs=False`` keeps none, ``scale_grads=False`` sums."""
    rank = Rank(2, 4, scale_grads=False)
    for number in range(2):  # gradients stay: the second step adds
        x, y = batch(number, 8)
        losses: list[Any] = [None]
        args, kwargs = rank.arguments(x, y, losses)
        output = rank.schedule.step(*args, **kwargs, loss_kwargs={"factor": 3.0}, return_outputs=False)
        rank.reference.run(
            ((part,) for part in x.chunk(4)), y.chunk(4), scales=False, loss=lambda o, t: loss_fn(o, t, factor=3.0)
        )
        assert output is None
        if rank.is_last:
            assert [loss.item() for loss in losses] == [loss.item() for loss in rank.reference.losses]
        else:
            assert losses == [None]
    assert rank.error() < 1e-11
    rank.schedule.close()


def deterministic_to_the_bit() -> None:
    """With ``deterministic=True`` the sums of gradients are those of one process, to the bit."""
    for split in (False, True):
        rank = Rank(2, 6, deterministic=True)
        for number in range(2):
            x, y = batch(number, 12)
            losses: list[Any] = []
            args, kwargs = rank.arguments(x, y, losses)
            output = rank.schedule.step(*args, **kwargs)
            rank.reference.run(((part,) for part in x.chunk(6)), y.chunk(6))
            rank.compare(output, losses, close=0.0 if not split else 1e-12)
            rank.zero_grad()
        rank.schedule.close()


def options_of_the_pipeline() -> None:
    """Any option can be passed, also by a class; the result says where the time went."""
    configured = ScheduleRRFP.configured(limit="n", trace_steps=1)
    modules = blocks(dist.get_world_size())
    stage = PipelineStage(modules[dist.get_rank()], dist.get_rank(), dist.get_world_size(), CPU)
    schedule = configured(stage, n_microbatches=4, loss_fn=loss_fn, scale_grads=False, hint="bf", transport="zmq")
    x, y = batch(0, 8)
    schedule.step(*((x,) if stage.is_first else ()), **only(stage.is_last, target=y))
    result = schedule.last_result
    assert result is not None
    assert result.microbatches == 4
    assert max(result.peak_held) <= dist.get_world_size()
    assert len(result.breakdown) == dist.get_world_size()
    schedule.close()


def a_strict_order() -> None:
    rank = Rank(1, 4, strict="1f1b")
    rank.steps(1)
    rank.schedule.close()


def a_profiler_of_all_threads_sees_tasks_under_the_names_of_torch() -> None:
    rank = Rank(1, 2, split=True)
    rank.steps(1)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config
    ) as profiler:
        rank.steps(1)
    names = {event.name for event in profiler.events() or () if event.name.startswith("PP:")}
    assert names == {f"PP:{dist.get_rank()}{kind}{m}" for kind in "FIW" for m in range(2)}
    rank.schedule.close()
