"""The pipeline of a schedule: made for its ranks, entered at once, and left in order however the schedule ends."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from rrfp import Pipeline, PipelineAborted
from rrfp.errors import RrfpError
from rrfp.integrations.torch.layout import Layout
from rrfp.integrations.torch.private import Stage
from rrfp.integrations.torch.program import StageTasks

logger = logging.getLogger(__name__)


class OpenPipeline:
    """A pipeline that is left once: by `close`, because of a failure, or when its owner or the interpreter ends.

    Args:
        pipeline: not entered.
        owner: the pipeline ends with its last reference.

    Attributes:
        calls: the pipeline's blocking calls.
    """

    def __init__(self, pipeline: Pipeline, owner: object) -> None:
        self.calls = pipeline.blocking()
        self.calls.__enter__()
        self._failure = ""
        self._leave = weakref.finalize(owner, leave_unasked, self.calls)

    def check_usable(self) -> None:
        """Refuse another step of a schedule that has ended."""
        if self._failure:
            raise RrfpError(f"this schedule ended with {self._failure}; build a new one")
        if not self._leave.alive:
            raise RrfpError("this schedule was closed; build a new one")

    def close(self) -> None:
        """Leave in order; a second call does nothing."""
        if self._leave.detach() is not None:
            self.calls.__exit__(None, None, None)

    def fail(self, error: BaseException) -> None:
        """Leave because of ``error``, on all ranks."""
        self._failure = type(error).__name__
        if self._leave.detach() is not None:
            self.calls.__exit__(type(error), error, error.__traceback__)


def pipeline_of(
    tasks: StageTasks,
    stages: Sequence[Stage],
    layout: Layout,
    mesh: DeviceMesh | None,
    coordinate: Sequence[str] | None,
    options: dict[str, Any],
) -> Pipeline:
    """The pipeline of the stages' group, not entered."""
    first = stages[0]
    device = torch.device(first.device)
    if device.type != "cpu":
        options = {"device": device, **options}
    options = {"chunks": len(stages), "placement": layout.placement, **options}
    if mesh is not None:
        return Pipeline(tasks, mesh=mesh, coordinate=coordinate, **options)
    group: Any = torch.distributed.group.WORLD if first.group is None else first.group
    alone = DeviceMesh.from_group(group, device.type, mesh_dim_names=("pp",))
    return Pipeline(tasks, mesh=alone, name=f"torch-{layout.token:x}", **options)


def leave_unasked(pipe: Any) -> None:
    """Leave, where the last reference to a schedule is gone, or the interpreter ends: in order, or by its error."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        _leave_quietly(pipe)
    else:  # the garbage collector may run on the pipeline's own loop, which must not wait for itself
        threading.Thread(target=_leave_quietly, args=(pipe,), name="rrfp-leaving").start()


def _end_of_program() -> BaseException | None:
    """The exception that ends this program, of which the other ranks are to learn; None if it goes on, or is done."""
    # In a session that goes on, this may be an earlier error: the main thread counts as alive until exit handlers run.
    return None if threading.main_thread().is_alive() else getattr(sys, "last_value", None)


def _leave_quietly(pipe: Any) -> None:
    error = _end_of_program()
    try:
        pipe.__exit__(None if error is None else type(error), error, None)
    except PipelineAborted as error:
        logger.warning("a schedule of this process, which nothing uses any more, had ended: %s", error)
