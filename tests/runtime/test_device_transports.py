"""Pipelines whose ranks compute on a device, over transports that carry its tensors and over others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compute.separate_double import CountingDouble
from torch import Tensor, nn

import rrfp
from rrfp.errors import PipelineAborted
from rrfp.lab.device_double import DoubleDevice
from rrfp.testing.reference import reference
from rrfp.transports.base import Transport, TransportContext
from rrfp.transports.inproc import InprocTransport


class Plugin(InprocTransport):
    """Knows no devices; checks that it sees none."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self.carries = frozenset({"cpu"})

    async def send(self, peer: int, message: rrfp.Message) -> None:
        copies = self.context.copies
        assert copies is not None
        assert not any(tensor is not None and copies.holds(tensor) for tensor in message.tensors)
        await super().send(peer, message)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def modules() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 1))]


def batch(count: int = 5) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.randn(m + 1, 6) for m in range(count)], [torch.randn(m + 1, 1) for m in range(count)]


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("transport", ["inproc", "shm", "zmq", Plugin])
def test_gradients_on_a_device(transport: str | Callable[[TransportContext], Transport], split: bool) -> None:
    parts, (inputs, targets) = modules(), batch()
    alone = copy.deepcopy(parts)
    want = reference(alone, inputs, targets, loss_fn=mean_square)
    with DoubleDevice() as device:
        options: dict[str, Any] = {"transport": transport, "device": device, "split": split}
        with rrfp.local(parts, loss_fn=mean_square, **options).blocking() as pipe:
            result = pipe.step(inputs, targets)
    assert result.loss == pytest.approx(want.loss)
    pairs = zip(nn.ModuleList(parts).parameters(), nn.ModuleList(alone).parameters(), strict=True)
    for parameter, expected in pairs:
        torch.testing.assert_close(parameter.grad, expected.grad)
    assert device.problems == []


def test_over_inproc_nothing_of_a_device_touches_host_memory() -> None:
    class Whole(CountingDouble):
        def holds(self, tensor: Tensor) -> bool:
            return DoubleDevice.holds(self, tensor)

    for transport, is_staged in (("inproc", False), (Plugin, True)):
        device = Whole()
        with (
            device,
            rrfp.local(modules(), loss_fn=mean_square, transport=transport, device=device).blocking() as pipe,
        ):
            pipe.step(*batch())
        assert (device.peak > 0) is is_staged


def test_a_copy_that_fails_aborts_every_rank_and_is_named() -> None:
    class Full(DoubleDevice):
        def empty_on_host(self, tensor: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("no pinned memory is left")

    with (
        Full() as device,
        pytest.raises(PipelineAborted, match="OutOfMemoryError: no pinned memory is left"),
        rrfp.local(modules(), loss_fn=mean_square, transport=Plugin, device=device).blocking() as pipe,
    ):
        pipe.step(*batch())
