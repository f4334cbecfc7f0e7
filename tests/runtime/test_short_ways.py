"""How many calls, and objects, lie between `step()` and the core, and between a message and its task.

A profile hook looks at real steps and real messages, so that a longer way fails here.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
from runtime.toys import data, loss_fn, stages

import rrfp
from rrfp.core import events as ev
from rrfp.model.mesh import Mesh
from rrfp.transports.rendezvous import LocalRendezvous

PACKAGE = str(Path(rrfp.__file__).parent)
BATCH = data(4)

#: A call of the project: its name, and the class of its ``self``.
Call = tuple[str, str]


def calls_to(frame: FrameType | None) -> list[Call]:
    """The project's calls that are under way, the outermost first."""
    calls = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            calls.append((frame.f_code.co_qualname, type(frame.f_locals.get("self")).__name__))
        frame = frame.f_back
    return [call for call in reversed(calls) if call[0] != "LoopThread._run"]


class Ways:
    """What was under way when a step, on the thread of its caller, went to the loop; and when the core took events."""

    def __init__(self) -> None:
        self.to_the_loop: list[list[Call]] = []
        self.to_the_core: dict[type, list[list[Call]]] = defaultdict(list)
        self.to_the_lane: list[list[Call]] = []

    def hook(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_qualname
        if event == "return" and name == "Session.submit":  # it has just called the loop
            calls = calls_to(frame)
            if calls and calls[0][0].endswith(".step"):
                self.to_the_loop.append(calls)
        elif event == "call" and name == "StageCore.apply":
            self.to_the_core[type(frame.f_locals["event"])].append(calls_to(frame.f_back))
        elif event == "call" and name in ("ThreadLane.enqueue", "OfferSlot.offer"):
            self.to_the_lane.append(calls_to(frame.f_back))


@contextmanager
def watched() -> Iterator[Ways]:
    """Watch this thread, and those that begin meanwhile."""
    ways = Ways()
    threading.setprofile(ways.hook)
    sys.setprofile(ways.hook)
    try:
        yield ways
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def one_rank() -> None:
    with rrfp.Pipeline(stages(1)[0], topology=rrfp.Topology(0, 1), loss_fn=loss_fn, lock_watch=False) as pipe:
        pipe.step(BATCH.inputs, BATCH.targets)


def several_local_ranks() -> None:
    with rrfp.local(stages(3), loss_fn=loss_fn) as pipe:
        pipe.step(BATCH.inputs, BATCH.targets)


def replicas() -> None:
    """Two of one stage, each on a thread; the second one enters where the first is waited for."""
    mesh, met = Mesh((("pp", 1), ("dp", 2))), LocalRendezvous()
    options: Any = {"rendezvous": met, "transport": "inproc", "lock_watch": False}
    programs = [Alone() for _ in range(2)]
    with patch("rrfp.pipeline.api._numbers", defaultdict(lambda: itertools.repeat(0))):
        pipes = [
            rrfp.Pipeline(program, topology=rrfp.Topology.at(rank, mesh), **options)
            for rank, program in enumerate(programs)
        ]

    def run(pipe: rrfp.Pipeline) -> None:
        with pipe as entered:
            entered.step(microbatches=2)

    threads = [threading.Thread(target=run, args=(pipe,)) for pipe in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)


class Alone(rrfp.StageProgram):
    """The only stage: computes nothing."""

    def open(self, step: Any, batch: rrfp.Batch) -> None:
        self._done: dict[int, float] = {}

    def forward(self, task: Any, inputs: Any) -> rrfp.Payload:
        self._done[task.microbatch] = 1.0
        return rrfp.Payload()

    def backward(self, task: Any, grads: Any) -> tuple[rrfp.Payload, ...]:
        return ()

    def losses(self) -> dict[int, float]:
        return self._done


@pytest.mark.parametrize("run", [one_rank, several_local_ranks, replicas])
def test_a_step_is_eight_calls_through_five_objects_to_the_core(run: Callable[[], None]) -> None:
    with watched() as ways:
        run()
    assert ways.to_the_loop
    assert ways.to_the_core[ev.StepOpened]
    for before in ways.to_the_loop:
        for behind in ways.to_the_core[ev.StepOpened]:
            calls = [*before, *behind]
            assert len(calls) <= 8, calls
            assert len({owner for _, owner in calls if owner != "NoneType"}) <= 4, calls  # the core is the fifth


@pytest.mark.parametrize("run", [one_rank, several_local_ranks])
def test_a_program_without_finish_costs_one_call_a_task_and_one_for_the_losses(run: Callable[[], None]) -> None:
    with watched() as ways:
        run()
    num_stages = len(ways.to_the_core[ev.StepOpened])
    taken = sum(1 for calls in ways.to_the_core[ev.Completed])
    extra = [calls for calls in ways.to_the_lane if any(name == "LaneExecutor.run_extra" for name, _ in calls)]
    assert taken == num_stages * 2 * len(BATCH.inputs)
    assert len(extra) == 1
