"""After a step has returned: what its result keeps alive, and which process ends first where another rank fails."""

from __future__ import annotations

import gc
import os
import time
import weakref
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from fork_server import fork_server
from runtime.processes import Processes
from runtime.toys import data, loss_fn, stages

import rrfp
from rrfp.errors import PipelineAborted, RrfpError
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import Kind, Task
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.pipeline.loop_thread import AwaitedFutures

__all__ = ["fork_server"]


@pytest.mark.parametrize("is_read", [False, True])
def test_a_kept_result_keeps_no_part_of_the_pipeline_alive(is_read: bool) -> None:
    modules = stages(2)
    alive = [weakref.ref(module) for module in modules]
    with rrfp.local(modules, loss_fn=loss_fn).blocking() as pipe:
        result = pipe.step(data(2).inputs, data(2).targets)
        if is_read:
            assert result.seconds > 0
    del modules, pipe
    deadline = time.monotonic() + 10
    while any(module() is not None for module in alive):  # threads of the pipeline may be about to end
        assert time.monotonic() < deadline
        gc.collect()
    assert result.seconds > 0


def test_a_future_of_a_pipeline_that_was_left_fails_at_once_with_the_first_error() -> None:
    futures, before, after = AwaitedFutures(), Future[None](), Future[None]()
    futures.add(before)
    for error in (RrfpError("left"), RrfpError("later")):
        futures.fail(error)
    futures.add(after)
    assert [str(future.exception(0)) for future in (before, after)] == ["left", "left"]


def fails_in_the_last_task(returned: Path, task: Task) -> float:
    """Fails once the other stage's ``step()`` has returned: opening a pipe to read waits for its writer."""
    if task == Task(Kind.B, 0, 0):
        returned.read_bytes()
        raise ValueError("broken")
    return 0.0


def leave_once_the_other_has_failed(returned: Path, stage: int, pipe: BlockingPipeline, connection: Connection) -> Any:
    """Stage 0 fails and goes on living; stage 1, which had done its part, leaves when it knows of that."""
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    if stage == 0:
        try:
            return pipe.step(microbatches=1)
        except PipelineAborted:
            connection.send("failed")
            connection.recv()
            raise
    pending = pipe.step(microbatches=1).pending
    returned.write_bytes(b"")
    assert pending is not None
    pending.outcome.exception(20)  # returns when the abort has come
    connection.send("leaving")
    return None


def test_under_torchrun_a_rank_that_leaves_lets_the_process_at_fault_end_first(tmp_path: Path) -> None:
    returned = tmp_path / "returned"
    os.mkfifo(returned)
    program, durations = partial(leave_once_the_other_has_failed, returned), partial(fails_in_the_last_task, returned)
    ranks = Processes(tmp_path, 2, program, durations, mesh=Mesh((("pp", 2),)))
    try:
        assert (ranks.hear(0), ranks.hear(1)) == ("failed", "leaving")
        assert not ranks.connections[1].poll(0.3), "stage 1 ends before stage 0, which torchrun then does not blame"
        ranks.connections[0].send("end")
        told = time.monotonic()
        for stage in (0, 1):
            assert ranks.end(stage).text == "aborted by stage 0, task B0@0: ValueError: broken"
        ranks.join(told)
    finally:
        ranks.kill()
