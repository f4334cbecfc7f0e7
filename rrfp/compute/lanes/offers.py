"""The slot of an offered call: a lane begins it as soon as the running call returns, without waiting for the loop.

The loop may withdraw it until then. Who comes first has it: both sides take it out of a deque, which is atomic.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rrfp.compute.lanes.base import Execution

T = TypeVar("T")


class OfferSlot:
    """Holds one call at most. See `Lane.offers` for when a lane takes it."""

    def __init__(self) -> None:
        self._offered: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()

    def offer(self, call: Callable[[], T]) -> asyncio.Future[Execution[T]]:
        """Let the lane make a call when the running one has returned. Called on the loop of the lane's `start`.

        Args:
            call: a function without arguments.

        Returns:
            A future as `Lane.enqueue` returns it. It stays pending if the call is withdrawn, or never made.

        Raises:
            RuntimeError: if a call is offered already.
        """
        if self._offered:
            raise RuntimeError("a call is offered already, which must be withdrawn first")
        future: asyncio.Future[Execution[T]] = asyncio.get_running_loop().create_future()
        self._offered.append((call, future))
        return future

    def withdraw(self) -> bool:
        """Take the offered call back.

        Returns:
            False if there is none: after an `offer` that means that the lane has begun the call, or is about to.
        """
        return self.pop() is not None

    def pop(self) -> tuple[Callable[[], Any], asyncio.Future[Any]] | None:
        """For the lane, on any thread: the offered call with its future, which is offered no more; None without one."""
        try:
            return self._offered.popleft()
        except IndexError:
            return None
