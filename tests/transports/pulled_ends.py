"""Ranks that pull tensors from each other, on doubles."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import torch
import transports.makers as makers
from compute.separate_double import SeparateDouble, check_races, closing
from torch import Tensor
from transports.peer_process import stuck_after_trial

from rrfp.compute.lanes.stream import StreamLane
from rrfp.devices.copies import copies_of
from rrfp.lab.device_double.device import DoubleSharing
from rrfp.testing.transport_checks import PairOptions
from rrfp.transports.auto import auto_transport
from rrfp.transports.base import Transport
from rrfp.transports.cuda_ipc.transport import CudaIpcTransport


class Stuck(SeparateDouble):
    """Completes the trial, and nothing after it."""

    def __init__(self) -> None:
        super().__init__(stuck_after_trial)


class Ends:
    """Started transports and their devices."""

    def __init__(self, devices: Sequence[SeparateDouble | None], **changes: Any) -> None:
        self.devices = devices
        options = PairOptions(ranks=len(devices))
        contexts = makers.contexts(options, **({"rendezvous": makers.Store()} | changes))
        self.contexts = [
            replace(context, copies=None if device is None else copies_of(device, StreamLane))
            for context, device in zip(contexts, devices, strict=True)
        ]
        self.ranks: list[Transport] = [auto_transport(context) for context in self.contexts]

    @property
    def left(self) -> Transport:
        return self.ranks[0]

    @property
    def right(self) -> Transport:
        return self.ranks[1]


@asynccontextmanager
async def ends(*devices: SeparateDouble | None, may_race: bool = False, **changes: Any) -> AsyncIterator[Ends]:
    made = Ends(devices or (SeparateDouble(0.0), SeparateDouble(0.0)), **changes)
    async with closing(made.devices), makers.started(*made.ranks):
        yield made
    if not may_race:
        check_races(made.devices)


def kinds(transport: Transport) -> dict[int, type[Transport]]:
    assert isinstance(transport, CudaIpcTransport)
    return {peer: type(inner) for peer, inner in transport._by_peer.items()}


class Refusing(DoubleSharing):
    """Refuses, or fails, in one of its parts, from a certain call on."""

    def __init__(self, part: str, calls: int = 0) -> None:
        self._part = part
        self._left = calls

    def _fails(self, part: str) -> bool:
        self._left -= part == self._part
        return part == self._part and self._left < 0

    def share(self, tensor: Tensor) -> tuple[dict[str, Any], object]:
        if self._fails("share"):
            raise OSError("operation not supported")
        fields, kept = super().share(tensor)
        if self._fails("fields"):
            fields["length"] = -1
        if self._fails("release"):
            kept = None
        return fields, kept

    def open(self, fields: Mapping[str, Any]) -> Tensor:
        if self._fails("open"):
            raise OSError("invalid device context")
        opened = super().open(fields)
        return torch.zeros_like(opened) if self._fails("bytes") else opened


def refusing(part: str, calls: int = 0) -> SeparateDouble:
    device = SeparateDouble(0.0)
    device.sharing = Refusing(part, calls)
    return device
