"""What passes between stages, and the memory that a step holds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from integrations.torch_parts import CPU, WIDTH, Block, Rank, Reference, batch, loss_fn
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import rrfp
from rrfp.integrations.torch import ScheduleRRFP


class Several(nn.Module):
    """Takes and returns a differentiable tensor, one that the last stage does not use, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, side: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        if side is None or mask is None:
            side, mask = self.linear(x) * 2, (x > 0).long()
        return self.linear(x) * mask, side.tanh(), mask


class FirstOf(nn.Module):
    """The last stage: it does not use the second tensor, whose gradient is zeros everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, side: Tensor, mask: Tensor) -> Tensor:
        output: Tensor = self.linear(x) * mask
        return output


def several_tensors_one_of_them_unused() -> None:
    """Whole numbers and a tensor without a gradient pass; shapes vary, so zeros have each microbatch's own shape."""
    ranks, me = dist.get_world_size(), dist.get_rank()

    def made() -> list[nn.Module]:
        torch.manual_seed(1)
        return [*(Several() for _ in range(ranks - 1)), FirstOf()]

    modules, reference = made(), Reference(made())
    stage = PipelineStage(modules[me], me, ranks, CPU)
    schedule = ScheduleRRFP([stage], 3, loss_fn)
    for lengths in ((2, 4, 3), (5, 1, 2)):
        inputs = [torch.randn(length, WIDTH) for length in lengths]
        for part in inputs:
            dist.broadcast(part, 0)
        given: dict[str, Any] = {"arg_mbs": [(x,) for x in inputs]} if stage.is_first else {"kwarg_mbs": [{}] * 3}
        if stage.is_last:
            given["target_mbs"] = [x.tanh() for x in inputs]
        schedule.step(**given)
        reference.run(((x,) for x in inputs), [x.tanh() for x in inputs])
        for own, other in zip(modules[me].parameters(), reference.modules[me].parameters(), strict=True):
            assert own.grad is not None
            assert other.grad is not None
            assert torch.allclose(own.grad, other.grad, rtol=0, atol=1e-12)
        modules[me].zero_grad()
        reference.modules[me].zero_grad()
    schedule.close()


class Shift(nn.Module):
    """Adds a parameter to its input, both by views of one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(2 * 3 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x.view(-1, WIDTH) + self.shift.view(-1, WIDTH)).reshape(x.shape) * 1


def no_gradient_of_a_parameter_is_memory_of_a_message() -> None:
    """autograd would let them share it, and later microbatches would change a message that waits to be sent."""

    def memory(tensors: Iterable[Tensor | None]) -> set[int]:
        return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}

    for split in (False, True):
        rank = Rank(2, 6, make=Shift, split=split)
        tasks = rank.schedule._tasks
        passed: list[tuple[rrfp.Payload, ...]] = []
        run = tasks.backward

        def recorded(
            task: rrfp.Task,
            grads: tuple[rrfp.Payload, ...],
            run: Any = run,
            passed: list[tuple[rrfp.Payload, ...]] = passed,
        ) -> tuple[rrfp.Payload, ...]:
            passed.append(grads)
            sent: tuple[rrfp.Payload, ...] = run(task, grads)
            passed.append(sent)
            return sent

        with patch.object(tasks, "backward", recorded):
            x, y = batch(0, 12)
            args, kwargs = rank.arguments(x, y, [])
            rank.schedule.step(*args, **kwargs)
        of_messages = memory(tensor for payloads in passed for payload in payloads for tensor in payload.tensors)
        of_gradients = memory(p.grad for module in rank.modules.values() for p in module.parameters())
        assert of_messages
        assert of_gradients
        assert not of_messages & of_gradients
        rank.zero_grad()
        rank.steps(1)
        rank.schedule.close()


def nothing_is_left_after_a_step() -> None:
    """Activations are freed with the step, without the garbage collector; only outputs and losses stay."""
    alive: list[weakref.ref[Tensor]] = []

    def make() -> nn.Module:
        module = Block()
        module.up.register_forward_hook(lambda _m, _i, output: alive.append(weakref.ref(output)))
        return module

    for split in (False, True):
        rank = Rank(2, 4, make=make, split=split)
        rank.steps(1)
        x, y = batch(1, 8)
        losses: list[Any] = []
        args, kwargs = rank.arguments(x, y, losses)
        alive.clear()
        gc.collect()
        gc.disable()
        try:
            output = rank.schedule.step(*args, **kwargs)
            del output
            losses.clear()
            assert alive
            assert [each() for each in alive if each() is not None] == []
            infos = [infos for s in rank.stages for infos in (*s.args_recv_info.values(), *s.grad_recv_info.values())]
            assert [info for each in infos for info in each if info.buffer is not None] == []
        finally:
            gc.enable()
        rank.schedule.close()


def an_evaluation_holds_few_microbatches() -> None:
    """As many as the limit allows, not all of them."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal most
        alive.append(weakref.ref(output))
        most = max(most, sum(each() is not None for each in alive))

    def make() -> nn.Module:
        module = Block()
        module.register_forward_hook(watch)
        return module

    rank = Rank(1, 24, make=make, limit=2)
    x, y = batch(0, 48)
    args, kwargs = rank.arguments(x, y, [])
    rank.schedule.eval(*args, **kwargs, return_outputs=False)
    assert len(alive) == 25  # the first infers shapes
    assert most <= 6
    rank.schedule.close()
