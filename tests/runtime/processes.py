"""Real processes, one a rank."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from runtime.children import Children, End
from runtime.stuck_hints import sleep_with_the_lock
from runtime.toys import data, loss_fn, stages
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]

import rrfp
from rrfp.lab.emulated import Durations, EmulatedStage
from rrfp.model.graph import TaskGraph
from rrfp.model.mesh import Mesh
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.runtime.steps.dealer import FEW
from rrfp.transports.rendezvous import StoreRendezvous
from rrfp.transports.shm import liveness

BATCH = data(4)

#: For how long a peer may be silent here: tests do not wait for a user's 10 s.
PATIENCE_S = 1.5

#: What a rank's program does with its pipeline; it may say something to the test.
Program = Callable[[int, BlockingPipeline, Connection], Any]


class Slow(nn.Module):
    """Sleeps in every forward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.inner = stages(1)[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        output: torch.Tensor = self.inner(x)
        return output


class Processes(Children):
    """Runs ``program`` on ``count`` ranks.

    Args:
        folder: where the ranks meet.
        count: N.
        program: what each rank does; importable.
        seconds: what a forward takes; of emulated stages, what every task takes, or a function that says it.
        chunks: how many chunks each rank has.
        mesh: how the ranks are laid out; they have emulated stages then.
        stderr: a folder, in which each rank prints its errors to a file of its own, ``stderr-RANK``.
        options: of every pipeline.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        program: Program,
        seconds: float | Durations = 0.01,
        chunks: Sequence[int] = (),
        mesh: Mesh | None = None,
        stderr: Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        for stage in range(count):
            own = chunks[stage] if chunks else 1
            errors = None if stderr is None else str(stderr / f"stderr-{stage}")
            arguments = (str(folder / "store"), stage, count, program, seconds, own, mesh, errors, options)
            self.start(f"rank-{stage}", _run, *arguments)

    def pid(self, stage: int) -> int:
        """The process id of a rank."""
        return int(self.processes[stage].pid)


def _run(
    store: str,
    rank: int,
    count: int,
    program: Program,
    seconds: Any,
    chunks: int,
    mesh: Mesh | None,
    stderr: str | None,
    options: Mapping[str, Any],
    connection: Connection,
) -> None:
    if stderr is not None:
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    torch.set_num_threads(1)
    records: list[tuple[str, float]] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.getMessage(), time.monotonic()))  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    rendezvous = StoreRendezvous(FileStore(store, count), run_id="test")
    place = rrfp.Topology(rank, count) if mesh is None else rrfp.Topology.at(rank, mesh)
    modules: Any = [Slow(seconds) for _ in range(chunks)]
    if mesh is not None:
        durations = seconds if callable(seconds) else lambda task: seconds
        modules = EmulatedStage(TaskGraph.chain(place.stages), durations, num_bytes=64)
    quick: Any = {"stall_after": 1.0, "patience": PATIENCE_S, "lock_watch": False}
    settings = {"loss_fn": loss_fn, **quick, **options}
    pipeline = rrfp.Pipeline(modules, topology=place, rendezvous=rendezvous, **settings)

    def train() -> Any:
        with pipeline.blocking() as pipe:
            return program(rank, pipe, connection)

    end = End.of(train)
    end.logged, end.logged_at = [text for text, _ in records], [at for _, at in records]
    connection.send(end)
    connection.close()


def steps_for_ever(stage: int, pipe: BlockingPipeline, connection: Connection) -> None:
    for number in range(10**6):
        pipe.step(BATCH.inputs, BATCH.targets)
        if number == 2:
            connection.send("stepping")


def emulated_steps_for_ever(rank: int, pipe: BlockingPipeline, connection: Connection) -> None:
    for number in range(10**6):
        pipe.step(microbatches=4)
        if number == 2:
            connection.send("stepping")


def dealt_steps_for_ever(rank: int, pipe: BlockingPipeline, connection: Connection) -> None:
    """Of two replicas that share microbatches one has more: some move in every step."""
    batch = [torch.zeros(64)] * (2 if rank % 2 else 8)
    for number in range(10**6):
        result = pipe.step(batch)
        if number == FEW + 1:
            connection.send("stepping" if result.dealt else f"dealt {result.dealt}")


def emulated_steps(rank: int, pipe: BlockingPipeline, connection: Connection) -> Any:
    results = [pipe.step(microbatches=4) for _ in range(3)]
    return [(result.step, result.peak_held, result.seconds) for result in results]


def pause_between_steps(stage: int, pipe: BlockingPipeline, connection: Connection) -> None:
    pipe.step(BATCH.inputs, BATCH.targets)
    for _ in range(2):
        connection.send("stepping")
        connection.recv()
        pipe.step(BATCH.inputs, BATCH.targets)


def fork_a_worker(stage: int, pipe: BlockingPipeline, connection: Connection) -> None:
    """As a data loader does that starts its workers inside the block; they outlive a kill."""
    if stage == 1:
        worker = os.fork()
        if worker == 0:
            signal.pause()
        connection.send(worker)
    steps_for_ever(stage, pipe, connection)


def die_between_steps(stage: int, pipe: BlockingPipeline, connection: Connection) -> None:
    pipe.step(BATCH.inputs, BATCH.targets)
    if stage == 1:
        connection.send("dying")
        connection.close()
        os._exit(7)
    pipe.step(BATCH.inputs, BATCH.targets)


def leave_early(stage: int, pipe: BlockingPipeline, connection: Connection) -> None:
    pipe.step(BATCH.inputs, BATCH.targets)
    if stage != 1:
        pipe.step(BATCH.inputs, BATCH.targets)


def three_steps(stage: int, pipe: BlockingPipeline, connection: Connection) -> Any:
    results = [pipe.step(BATCH.inputs, BATCH.targets) for _ in range(3)]
    return [(result.loss, result.losses, result.peak_held) for result in results]


def hang_on_the_lane(stage: int, pipe: BlockingPipeline, connection: Connection) -> None:
    connection.send("stepping")
    if stage == 2:
        time.sleep(0.5)
        raise ValueError("enough")
    pipe.step(BATCH.inputs, BATCH.targets)


def step_where_no_cgroup_can_be_read(rank: int, pipe: BlockingPipeline, connection: Connection) -> None:
    """As if each rank were in a container of its own."""
    liveness.is_frozen = lambda pid: None
    pipe.step(microbatches=4)


def keep_the_lock(stage: int, pipe: BlockingPipeline, connection: Connection) -> None:
    """Nothing else of Python runs in the process for four seconds."""
    pipe.step(BATCH.inputs, BATCH.targets)
    sleep_with_the_lock(4.0)
    pipe.step(BATCH.inputs, BATCH.targets)
