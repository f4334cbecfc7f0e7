"""A device that at once reuses, and spoils, the memory of received tensors that was freed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rrfp.devices.base import Device, DeviceMemory, Stream

#: So many tensors of a shape are spoilt at a time, to get at all freed blocks of that size.
_COPIES = 6


class PoisonedDevice(Device):
    """Passes everything on to ``device``, and remembers which memory `empty` made, and on which stream.

    Args:
        device: the real one.
        forgets: `note_use` does nothing: the mistake that poison shows.
    """

    def __init__(self, device: Device, *, forgets: bool = False) -> None:
        self.kind, self.name = device.kind, device.name
        self.spoilt = 0
        self._device = device
        self._forgets = forgets
        self._made: dict[Any, tuple[Stream, Tensor]] = {}

    def empty(self, tensor: Tensor) -> Tensor:
        """See :meth:`Device.empty`."""
        stream = self._device.current_stream()
        pattern = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self._made.setdefault((getattr(stream, "stream", stream), pattern.shape, pattern.dtype), (stream, pattern))
        return self._device.empty(tensor)

    def spoil(self) -> None:
        """Make memory of the same sizes on the same streams, and fill it."""
        for stream, pattern in list(self._made.values()):
            with stream.issuing():
                made = [self._device.empty(pattern) for _ in range(_COPIES)]
                for tensor in made:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
            self.spoilt += len(made)

    @contextmanager
    def spoiling(self, pause_s: float) -> Iterator[None]:
        """Within, another thread spoils all the time, with pauses."""
        ended = threading.Event()

        def go_on() -> None:
            while not ended.wait(pause_s):
                self.spoil()

        thread = threading.Thread(target=go_on, name="poison", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def note_use(self, tensor: Tensor, stream: Stream) -> None:
        """See :meth:`Device.note_use`."""
        if not self._forgets:
            self._device.note_use(tensor, stream)

    def keep_noted(self) -> None:
        """See :meth:`Device.keep_noted`."""
        self._device.keep_noted()

    def stream(self, *, is_urgent: bool = False) -> Stream:
        """See :meth:`Device.stream`."""
        return self._device.stream(is_urgent=is_urgent)

    def current_stream(self) -> Stream:
        """See :meth:`Device.current_stream`."""
        return self._device.current_stream()

    def holds(self, tensor: Tensor) -> bool:
        """See :meth:`Device.holds`."""
        return self._device.holds(tensor)

    def empty_on_host(self, tensor: Tensor) -> Tensor:
        """See :meth:`Device.empty_on_host`."""
        return self._device.empty_on_host(tensor)

    def memory(self) -> DeviceMemory:
        """See :meth:`Device.memory`."""
        return self._device.memory()

    def explain(self, error: Exception) -> Exception:
        """See :meth:`Device.explain`."""
        return self._device.explain(error)
