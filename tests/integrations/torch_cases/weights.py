"""Split backwards: hooks, compiled modules, and work of weights that a stage does itself, by a ``dw_builder``."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from integrations.torch_parts import CPU, WIDTH, Block, Rank, Reference, WeightsLast, batch, blocks, loss_fn, only
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import rrfp
from rrfp.compute.split import backward as split_backward
from rrfp.integrations.torch import ScheduleRRFP


class Deferred(torch.autograd.Function):
    """A linear layer whose gradient of the weight is computed later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, later: list[Callable[[], None]]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients

        def form() -> None:
            formed = gradient.flatten(0, -2).T @ x.flatten(0, -2)
            weight.grad = formed if weight.grad is None else weight.grad + formed

        ctx.later.append(form)
        return gradient @ weight, None, None


class DeferredLayer(nn.Module):
    """Keeps the work of its weight; the runners must be called first in, first out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.later: list[Callable[[], None]] = []
        self.queue: list[list[Callable[[], None]]] = []

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = Deferred.apply(x, self.weight, self.later)  # type: ignore[no-untyped-call]
        return output

    def builder(self) -> Callable[[], None]:
        work = list(self.later)
        self.queue.append(work)
        self.later.clear()

        def run() -> None:
            assert self.queue.pop(0) is work
            for form in work:
                form()

        return run


class LastMicrobatchFirst(WeightsLast):
    @staticmethod
    def key(task: rrfp.Task) -> int:
        return -task.microbatch


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def weight_work_of_the_callers_own() -> None:
    """A ``dw_builder`` with a queue: every W runs the work of the oldest B; with a whole backward too."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    mine = [me, me + ranks]
    for split in (False, True):
        modules: Any = blocks(2 * ranks, DeferredLayer)
        plain: Any = blocks(2 * ranks, Plain)
        reference = Reference(plain)
        stages = [PipelineStage(modules[v], v, 2 * ranks, CPU, dw_builder=modules[v].builder) for v in mine]
        schedule = ScheduleRRFP(stages, 4, loss_fn, split=split, hint=LastMicrobatchFirst if split else None)
        for number in range(2):
            x, y = batch(number, 8)
            schedule.step(*((x,) if me == 0 else ()), **only(me == ranks - 1, target=y))
            if number == 0:  # torch infers shapes with a backward, whose work is queued too
                for v in mine:
                    modules[v].zero_grad()
                continue
            reference.run(((part,) for part in x.chunk(4)), y.chunk(4))
            for v in mine:
                own, other = modules[v].weight.grad, plain[v].weight.grad
                assert torch.allclose(own, other, rtol=0, atol=1e-12), (split, v)
        schedule.close()


class Hooked(Block):
    """Hooks of every kind, which change gradients; it keeps how often they were called, and with what."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, float]] = Counter()
        self.retained: list[Tensor] = []
        self.up.weight.register_hook(self.scaled("weight", 2.0))  # type: ignore[no-untyped-call]
        self.down.register_full_backward_hook(self.of_module)

    def of_module(self, module: nn.Module, gradients: Any, _: Any) -> Any:
        return tuple(None if one is None else self.scaled("module", 3.0)(one) for one in gradients)

    def scaled(self, kind: str, factor: float) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            self.calls[kind, gradient.sum().item()] += 1
            return factor * gradient

        return hook

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        product = self.up(x.flatten(0, 1))  # of matrices: torch's own split calls hooks of its output twice
        product.register_hook(self.scaled("product", 10.0))
        hidden = torch.tanh(product).view(*x.shape[:-1], -1)
        hidden.register_hook(self.scaled("activation", 7.0))  # type: ignore[no-untyped-call]
        hidden.retain_grad()
        self.retained.append(hidden)
        view = self.down.weight.view_as(self.down.weight)
        view.register_hook(self.scaled("view", 5.0))  # type: ignore[no-untyped-call]
        output: Tensor = x + self.down(hidden) + nn.functional.linear(hidden, view)
        assert output.grad_fn is not None
        output.grad_fn.register_prehook(lambda grads: tuple(map(self.scaled("node", 1.5), grads)))
        return output


@contextmanager
def _everything_is_deferred() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_backward, "MIN_FLOPS", 0.0)
        yield


def hooks_run_once_in_a_split_backward() -> None:
    """And so gradients are those of a whole one, to the bit, in looped and V placement."""

    def trained(**options: Any) -> dict[str, Any]:
        rank = Rank(2, 4, make=Hooked, deterministic=True, **options)
        modules: dict[int, Any] = rank.modules
        for number in range(2):
            for module in modules.values():  # of the first step are those of torch's inference of shapes, too
                module.calls.clear()
                module.retained.clear()
            args, kwargs = rank.arguments(*batch(number, 8), [])
            rank.schedule.step(*args, **kwargs)
        rank.schedule.close()
        seen: dict[str, Any] = {}
        for v, module in modules.items():
            seen |= {f"{v}.{name}": parameter.grad.tolist() for name, parameter in module.named_parameters()}
            seen[f"{v} called"] = module.calls
            # Forwards come in any order.
            seen[f"{v} retained"] = sorted(one.grad.flatten().tolist() for one in module.retained)
            assert len(module.retained) == 4
        return seen

    whole, split = trained(), trained(split=True)
    with _everything_is_deferred():
        deferred = trained(split=True)
    vee = [trained(vee=True, split=split) for split in (False, True)]
    for actual, wanted in ((split, whole), (deferred, whole), vee):
        differing = [name for name in wanted if actual[name] != wanted[name]]
        assert not differing, differing


def compiled_modules_have_a_whole_backward() -> None:
    """In B, with one warning for each; or they are refused."""

    def compiled() -> nn.Module:
        module: Any = torch.compile(nn.Linear(WIDTH, WIDTH), backend="aot_eager")
        return nn.Sequential(module, nn.Tanh())

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rrfp").addHandler(handler)
    rank = Rank(1, 4, make=compiled, split=True)
    rank.steps(2)
    rank.schedule.close()
    logging.getLogger("rrfp").removeHandler(handler)
    said = [message for message in messages if "is not split: it is compiled by torch.compile" in message]
    assert len(said) == 1, messages
    for options in ({"unsplittable": "refuse"}, {"deterministic": True}):
        rank = Rank(1, 4, make=compiled, split=True, **options)
        args, kwargs = rank.arguments(*batch(0, 8), [])
        with pytest.raises(rrfp.PipelineAborted, match="cannot be split: it is compiled by torch"):
            rank.schedule.step(*args, **kwargs)
