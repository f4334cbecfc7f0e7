"""A lane on a thread that records the hooks that a lane in front of a device needs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from rrfp.compute.lanes.thread import ThreadLane


class RecordingLane(ThreadLane):
    """Records on which thread, and with which tensors, its hooks are called.

    Attributes:
        fences: the thread of each fence, and how many calls the lane had begun by then.
        adopted: tensors that a call of the lane has adopted.
        handed_over: tensors handed over, each with the thread.
    """

    def __init__(self, stage: int = 0) -> None:
        super().__init__(f"lane-{stage}")
        self.fences: list[tuple[int, int]] = []
        self.adopted: list[Tensor] = []
        self.handed_over: list[tuple[Tensor, int]] = []
        self._begun = 0
        self._is_calling = False

    def has_adopted(self, tensor: Tensor) -> bool:
        """Whether this very tensor was adopted."""
        return any(tensor is adopted for adopted in self.adopted)

    def fence(self) -> None:
        self.fences.append((threading.get_ident(), self._begun))

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        assert self._is_calling, "outside a call"
        assert self._thread is threading.current_thread()
        self.adopted += tensors

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        self.handed_over += [(tensor, threading.get_ident()) for tensor in tensors]

    def _run(self, call: Callable[[], Any], future: asyncio.Future[Any] | None, loop: Any) -> None:
        self._begun += 1
        self._is_calling = True
        try:
            super()._run(call, future, loop)
        finally:
            self._is_calling = False


class Lanes:
    """Makes the lanes of a pipeline and keeps them by stage."""

    def __init__(self) -> None:
        self.by_stage: dict[int, RecordingLane] = {}

    def __call__(self, stage: int) -> RecordingLane:
        return self.by_stage.setdefault(stage, RecordingLane(stage))
