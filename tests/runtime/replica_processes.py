"""Two stages by two replicas in four real processes, one of which comes to grief while its like waits for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fork_server import context
from runtime.children import End
from runtime.toys import Bomb, data, loss_fn
from torch.distributed import FileStore  # type: ignore[attr-defined]

import rrfp
from rrfp.errors import PipelineAborted
from rrfp.model.mesh import Mesh
from rrfp.transports.rendezvous import StoreRendezvous

MESH = Mesh((("pp", 2), ("dp", 2)))
OTHER_MESH = Mesh((("pp", 2), ("tp", 2)))
BATCH = data(2)

#: What the victim does in its second step, in its last forward; by then its like has nothing else to wait for.
Grief = Callable[[], None]


def die() -> None:
    """Be killed, some time after the like began to wait."""
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    """Raise."""
    time.sleep(0.5)
    raise ValueError("enough")


def elsewhere() -> None:
    """Not called: the victim takes the ranks to be laid out in another way."""


class Replicas:
    """Runs steps on four ranks until ``victim`` comes to grief.

    Args:
        folder: where the ranks meet.
        victim: its rank.
        grief: what happens to it; importable.
    """

    def __init__(self, folder: Path, victim: int, grief: Grief) -> None:
        forked = context()
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(MESH.size):
            here, there = forked.Pipe()
            arguments = (str(folder), rank, grief if rank == victim else None, there)
            process = forked.Process(target=_run, args=arguments, name=f"rank-{rank}")
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)

    def end(self, rank: int) -> End:
        """How ``rank`` ended."""
        assert self.connections[rank].poll(30), f"rank {rank} says nothing"
        told: End = self.connections[rank].recv()
        return told

    def kill(self) -> None:
        """Leave nothing behind, however the test went."""
        for process in self.processes:
            process.kill()
            process.join(10)
        for connection in self.connections:
            connection.close()


def _run(folder: str, rank: int, grief: Grief | None, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=MESH.size)

    def on_forward(number: int) -> None:
        if number == 2 * len(BATCH.inputs) - 1 and grief is not None:
            grief()

    pipeline = rrfp.Pipeline(
        Bomb(on_forward),
        topology=rrfp.Topology.at(rank, OTHER_MESH if grief is elsewhere else MESH),
        rendezvous=StoreRendezvous(FileStore(f"{folder}/store", MESH.size), run_id="test"),
        loss_fn=loss_fn,
    )
    error, text, origin = "", "", None
    began = time.monotonic()
    try:
        with pipeline.blocking() as pipe:
            for _ in range(3):
                began = time.monotonic()
                pipe.step(BATCH.inputs, BATCH.targets)
    except PipelineAborted as aborted:
        error, text = "PipelineAborted", str(aborted)
        origin = (
            aborted.origin.rank if aborted.origin.rank is not None else -1,
            aborted.origin.task,
            aborted.origin.cause,
        )
    except BaseException as other:
        error, text = type(other).__name__, str(other)
    connection.send(End(error, text, origin, time.monotonic(), time.monotonic() - began))
    connection.close()
    dist.destroy_process_group()
