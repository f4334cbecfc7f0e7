"""The ranks of one job in this process, each with a pipeline of its own: on threads, or on one virtual clock."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from runtime.toys import data, loss_fn

import rrfp
from rrfp.errors import PipelineAborted
from rrfp.lab.emulated import Durations
from rrfp.model.graph import TaskGraph
from rrfp.model.mesh import Mesh
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.testing.clock import EmulatedStage, SimulatedTransport, TimerLane
from rrfp.transports.rendezvous import LocalRendezvous

#: What the user of one rank does inside the ``with`` block.
Body = Callable[[int, BlockingPipeline], Any]

#: The most that may pass between a failure and the error on every rank, in seconds.
SOON_S = 2.0

BATCH = data(4)


def step(stage: int, pipe: BlockingPipeline) -> Any:
    """A body."""
    return pipe.step(BATCH.inputs, BATCH.targets)


def two_steps(stage: int, pipe: BlockingPipeline) -> Any:
    """A body."""
    step(stage, pipe)
    return step(stage, pipe)


def as_in_processes() -> Any:
    """In this context pipelines of one name are of one job, as those made in several processes are."""
    return patch("rrfp.pipeline.api._numbers", defaultdict(lambda: itertools.repeat(0)))


def virtual_ranks(
    mesh: Mesh, durations: Durations, transport: Any = SimulatedTransport, **options: Any
) -> list[rrfp.Pipeline]:
    """A pipeline for each rank, not entered. It computes nothing, and takes its time on timers of the caller's loop."""
    met, made = LocalRendezvous(), []
    with as_in_processes():
        for rank in range(mesh.size):
            lane = TimerLane()
            program = EmulatedStage(TaskGraph.chain(mesh.stages), durations, num_bytes=8, spend=lane.spend)
            own: Any = {"topology": rrfp.Topology.at(rank, mesh), "lane": lambda _, lane=lane: lane, "rendezvous": met}
            made.append(rrfp.Pipeline(program, **own, transport=transport, loop="caller", **options))
    return made


@dataclass
class Outcome:
    """How a rank's program ended: with a value, or with an exception; and when, by ``time.monotonic()``."""

    value: Any = None
    error: BaseException | None = None
    ended: float = 0.0

    @property
    def abort(self) -> PipelineAborted:
        assert isinstance(self.error, PipelineAborted), repr(self.error)
        return self.error


class ThreadedRanks:
    """One job, a thread a rank.

    Args:
        modules: one a rank, or a list of chunks.
        body: what each rank's user does; told the rank.
        own: options of some ranks, by rank.
        mesh: how the ranks are laid out; a rank a stage by default.
        options: of every other `rrfp.Pipeline`.
    """

    def __init__(
        self,
        modules: Sequence[Any],
        body: Body,
        own: Mapping[int, Mapping[str, Any]] | None = None,
        mesh: Mesh | None = None,
        **options: Any,
    ) -> None:
        met, count = LocalRendezvous(), len(modules)
        places = [rrfp.Topology(r, count) if mesh is None else rrfp.Topology.at(r, mesh) for r in range(count)]
        settings: Any = {"transport": "inproc", "loss_fn": loss_fn, "rendezvous": met, "lock_watch": False, **options}
        with as_in_processes():
            self.pipelines = [
                rrfp.Pipeline(module, **{"topology": places[rank], **settings, **(own or {}).get(rank, {})})
                for rank, module in enumerate(modules)
            ]
        self.outcomes = [Outcome() for _ in modules]
        self._body = body
        self._threads = [threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in range(count)]
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float = 20.0) -> list[Outcome]:
        """Wait for every rank's program."""
        deadline = time.monotonic() + timeout_s
        for rank, thread in enumerate(self._threads):
            thread.join(max(deadline - time.monotonic(), 0.0))
            assert not thread.is_alive(), f"rank {rank} hangs"
        return self.outcomes

    def _run(self, rank: int) -> None:
        outcome = self.outcomes[rank]
        try:
            with self.pipelines[rank].blocking() as pipe:
                outcome.value = self._body(rank, pipe)
        except BaseException as error:
            outcome.error = error
        outcome.ended = time.monotonic()
