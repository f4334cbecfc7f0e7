"""``save_trace`` between processes over zmq: one file of all ranks, and ranks that die or stay away meanwhile."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from fork_server import fork_server  # noqa: F401 - a fixture
from runtime.processes import BATCH, Processes, Program

from rrfp.lab.traces.chrome_reader import read_chrome
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.runtime import trace_saver

Start = Callable[..., Processes]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Processes] = []

    def begin(count: int, program: Program, **options: object) -> Processes:
        running.append(Processes(tmp_path, count, program, **options))  # type: ignore[arg-type]
        return running[-1]

    yield begin
    for processes in running:
        processes.kill()


def three_steps_then_save(stage: int, pipe: BlockingPipeline, connection: Connection) -> None:
    path = connection.recv()
    for _ in range(3):
        pipe.step(BATCH.inputs, BATCH.targets)
    pipe.save_trace(path)
    pipe.step(BATCH.inputs, BATCH.targets)


def save_while_rank_1_dies(stage: int, pipe: BlockingPipeline, connection: Connection) -> None:
    path, has_joined = connection.recv()
    pipe.step(BATCH.inputs, BATCH.targets)

    def die(*_: object) -> bytes:
        connection.send("dying")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    if stage == 1 and has_joined:
        trace_saver._pack = die  # type: ignore[assignment]  # after the ranks agreed on the steps
    elif stage == 1:
        die()
    pipe.save_trace(path)


def save_when_told(stage: int, pipe: BlockingPipeline, connection: Connection) -> None:
    path = connection.recv()
    pipe.step(BATCH.inputs, BATCH.targets)
    handler = logging.Handler()
    handler.emit = lambda record: connection.send(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rrfp.runtime.stall").addHandler(handler)
    if stage == 1:
        connection.recv()
    pipe.save_trace(path)


def test_processes_write_one_file_and_train_on(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "trace.json"
    ranks = start(3, three_steps_then_save)
    for connection in ranks.connections:
        connection.send(path)
    assert [ranks.end(stage).text for stage in range(3)] == [""] * 3
    [run] = read_chrome(path)
    assert (run.num_stages, [step.step for step in run.steps], run.clock_error) == (3, [0, 1, 2], 0)
    for step in run.steps:
        assert len(step.tasks) == 3 * 4 * 2
        ends = {span.task: span.end for span in step.tasks}
        starts = {(span.stage, span.task.kind, span.task.microbatch): span.start for span in step.tasks}
        assert len(step.messages) == 2 * 2 * 4
        for message in step.messages:  # the clock is one: after the task that made it, before the task that reads it
            assert message.arrived is not None
            assert ends[message.task] < message.arrived
            assert message.arrived < starts[message.target, message.task.kind, message.task.microbatch]


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_rank_that_dies_while_the_others_save_is_named_on_all(tmp_path: Path, start: Start, has_joined: bool) -> None:
    ranks = start(3, save_while_rank_1_dies)
    for connection in ranks.connections:
        connection.send((tmp_path / "trace.json", has_joined))
    assert ranks.hear(1) == "dying"
    killed = time.monotonic()
    for stage in (0, 2):
        end = ranks.end(stage)
        assert end.error == "PipelineAborted"
        assert end.origin is not None
        assert end.origin[0] == 1
        assert end.origin[2].startswith("PeerLostError: ")
        assert end.at - killed < 5.0
    ranks.join(killed)
    assert not (tmp_path / "trace.json").exists()


def test_a_rank_that_stays_away_is_named_while_the_others_wait(tmp_path: Path, start: Start) -> None:
    ranks = start(3, save_when_told, stall_after=0.2)
    for connection in ranks.connections:
        connection.send(tmp_path / "trace.json")
    while "save_trace was not called yet on stage 1" not in ranks.hear(0):
        pass
    ranks.connections[1].send("go on")
    assert [ranks.end(stage).text for stage in range(3)] == [""] * 3
    assert (tmp_path / "trace.json").exists()
