"""1F1B as Megatron runs it: a stage sends and receives in fixed places, and computes nothing until both have ended.

The order of `rrfp.lab.blocking`, which simulates it. A send over gloo ends when the receiver has taken the tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.shared.sleeping import SleepingStage
from rrfp.lab.emulated import sleep_until


class BlockingSchedule:
    """Runs a step of one stage.

    Args:
        module: the stage.
        stage: i.
        stages: N, one process each.
        microbatches: M.
        num_bytes: of the tensors between stages.

    Attributes:
        latency: seconds that every exchange takes longer, at both ends.
        waits: seconds of each exchange of the last step.
    """

    def __init__(self, module: SleepingStage, stage: int, stages: int, microbatches: int, num_bytes: int) -> None:
        self._module, self._stage, self._stages, self._microbatches = module, stage, stages, microbatches
        # One for each microbatch that may be held, as each is kept for its backward.
        count = num_bytes // 4
        self._held = min(microbatches, stages - stage)
        self._inputs = [torch.empty(count) for _ in range(self._held)]
        self._gradient = torch.empty(count)
        self.latency = 0.0
        self.waits: list[float] = []

    def __call__(self, sizes: Sequence[float] | None) -> Callable[[], object]:
        """Run the step."""
        self.waits = []
        count, warm_up = self._microbatches, min(self._microbatches, self._stages - 1 - self._stage)
        inputs: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        for m in range(warm_up):
            self._exchange(receives=self._forward_in(m))
            output = self._forward(m, inputs, outputs)
            self._exchange(sends=self._forward_out(output))
        if warm_up < count:
            self._exchange(receives=self._forward_in(warm_up))
        for m in range(count - warm_up):
            ahead = warm_up + m
            output = self._forward(ahead, inputs, outputs)
            self._exchange(sends=self._forward_out(output), receives=self._backward_in())
            gradient = self._backward(m, inputs, outputs)
            following = self._forward_in(ahead + 1) if ahead + 1 < count else []
            self._exchange(sends=self._backward_out(gradient), receives=following)
        for m in range(count - warm_up, count):
            self._exchange(receives=self._backward_in())
            self._exchange(sends=self._backward_out(self._backward(m, inputs, outputs)))
        return lambda: None

    def _exchange(
        self, *, sends: Sequence[tuple[Tensor, int]] = (), receives: Sequence[tuple[Tensor, int]] = ()
    ) -> None:
        if not sends and not receives:
            return
        began = time.monotonic()
        works = [dist.isend(tensor, peer) for tensor, peer in sends]
        works += [dist.irecv(tensor, peer) for tensor, peer in receives]
        for work in works:
            assert work is not None
            work.wait()
        if self.latency:
            sleep_until(time.monotonic() + self.latency)
        self.waits.append(time.monotonic() - began)

    def _forward(self, m: int, inputs: dict[int, Tensor], outputs: dict[int, Tensor]) -> Tensor:
        received = self._inputs[m % self._held].detach().requires_grad_() if self._stage else torch.zeros(1)
        inputs[m], outputs[m] = received, self._module(received, torch.tensor([m]))
        return outputs[m]

    def _backward(self, m: int, inputs: dict[int, Tensor], outputs: dict[int, Tensor]) -> Tensor | None:
        output = outputs.pop(m)
        if self._stage == self._stages - 1:
            output.sum().backward()  # type: ignore[no-untyped-call]
        else:
            torch.autograd.backward(output, self._gradient)
        return inputs.pop(m).grad

    def _forward_in(self, m: int) -> list[tuple[Tensor, int]]:
        return [(self._inputs[m % self._held], self._stage - 1)] if self._stage else []

    def _forward_out(self, output: Tensor) -> list[tuple[Tensor, int]]:
        return [(output.detach(), self._stage + 1)] if self._stage < self._stages - 1 else []

    def _backward_in(self) -> list[tuple[Tensor, int]]:
        return [(self._gradient, self._stage + 1)] if self._stage < self._stages - 1 else []

    def _backward_out(self, gradient: Tensor | None) -> list[tuple[Tensor, int]]:
        if not self._stage:
            return []
        assert gradient is not None
        return [(gradient, self._stage - 1)]
