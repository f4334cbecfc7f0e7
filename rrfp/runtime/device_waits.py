"""Names tasks whose calls keep the host for as long as the device computes, though they only have to issue its work."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rrfp.compute.lanes.base import Execution
from rrfp.core.tasks import Kind, Task
from rrfp.log import get_logger

logger = get_logger(__name__)

#: A call that returns before this share of its device time is over leaves the host time for the next one.
_MOST_OF_IT = 0.8

#: Shorter calls, in seconds, are not worth a line.
_NOTICEABLE_S = 1e-3

#: The first calls of a kind load kernels, measure and compile; so only the last of so many in a row is named.
_IN_A_ROW = 3


class DeviceWaits:
    """Looks at the executions of one rank. Each kind of task is named once for each virtual stage."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        #: Calls in a row that kept the host; after `_IN_A_ROW` they are counted no more.
        self._kept: Counter[tuple[Kind, int]] = Counter()

    def saw(self, task: Task, execution: Execution[Any]) -> None:
        """``task`` has completed."""
        if execution.launched is None:
            return
        key = (task.kind, task.virtual_stage)
        if self._kept[key] == _IN_A_ROW:
            return
        # Both from the device's start: behind another task a call may return before the device begins with it.
        host, device = execution.launched - execution.started, execution.ended - execution.started
        self._kept[key] = self._kept[key] + 1 if host > _NOTICEABLE_S and host >= _MOST_OF_IT * device else 0
        if self._kept[key] == _IN_A_ROW:
            logger.warning(
                "%s kept the host as long as the device (%.1f of %.1f ms), as the two calls of its kind before did: it "
                "waits for the device (.item(), .cpu(), nonzero?) or launches many small kernels",
                task,
                host * 1e3,
                device * 1e3,
                stage=self._stage,
            )
