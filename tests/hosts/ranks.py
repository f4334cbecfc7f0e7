"""One rank on each host, as torchrun starts it there: its environment, its store on the first host."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from hosts.network import Network, enter
from runtime.children import Children, End
from runtime.processes import BATCH, Slow
from runtime.toys import loss_fn, stages

import rrfp
from rrfp.pipeline.faces import BlockingPipeline

#: Of a rank's store, on the first host. The hosts have no other programs.
PORT = 29500

#: The state of a listening socket in /proc.
_LISTEN = "0A"

#: Ends a rank's process.
_LEAVE = "leave"

Program = Callable[[int, BlockingPipeline, Connection], Any]


class Ranks(Children):
    """Runs ``program`` on each host of a network.

    Args:
        network: the hosts.
        program: what each rank does; importable.
        ipv6: the hosts know each other by these addresses.
        secret: of the job; none where it is empty.
        seconds: what a forward sleeps.
        options: of every pipeline.
    """

    def __init__(
        self,
        network: Network,
        program: Program,
        *,
        ipv6: bool = False,
        secret: str = "",
        seconds: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        master = network.hosts[0].ipv6 if ipv6 else network.hosts[0].ipv4
        for host in network.hosts:
            environ = {
                **{"MASTER_ADDR": master, "MASTER_PORT": str(PORT), "TORCHELASTIC_RUN_ID": "hosts"},
                **{"RANK": str(host.index), "WORLD_SIZE": str(len(network.hosts))},
                **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
                **({"RRFP_SECRET": secret} if secret else {}),
            }
            self.start(f"host-{host.index}", _run, host.namespace, environ, program, seconds, options)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_for_steps(self) -> None:
        """Wait until each rank is between its steps."""
        for rank in range(len(self.processes)):
            said = self.hear(rank)
            assert said == "stepping", said

    def join(self, since: float, within_s: float = 15.0) -> None:
        """Let the processes go, once each has said its end, and wait until they have ended."""
        for connection in self.connections:
            connection.send(_LEAVE)
        super().join(since, within_s)

    def steps_of(self, rank: int) -> int:
        """How many steps ``rank`` has completed by now."""
        self.connections[rank].send("how many?")
        while type(said := self.hear(rank)) is not int:
            assert not isinstance(said, End), said
        return said

    def wait_for_more_steps(self, than: int, within_s: float = 20.0) -> None:
        """Wait until the first rank has completed more steps."""
        ends = time.monotonic() + within_s
        while self.steps_of(0) <= than:
            assert time.monotonic() < ends, f"no step in {within_s} s"


def _run(
    namespace: str,
    environ: Mapping[str, str],
    program: Program,
    seconds: float,
    options: Mapping[str, Any],
    connection: Connection,
) -> None:
    enter(namespace)
    os.environ.update(environ)
    torch.set_num_threads(1)
    rank = int(environ["RANK"])

    def train() -> Any:
        settings: Any = {"loss_fn": loss_fn, "stall_after": 5.0, **options}
        topology = rrfp.Topology.from_env()
        module = Slow(seconds) if seconds else stages(1)[0]
        with rrfp.Pipeline(module, topology=topology, **settings).blocking() as pipe:
            return program(rank, pipe, connection)

    connection.send(End.of(train))
    with suppress(EOFError):  # the first host's process has the store, which another rank may still read
        while connection.recv() != _LEAVE:
            pass
    connection.close()


def steps_for_ever(rank: int, pipe: BlockingPipeline, connection: Connection) -> None:
    """Step; says once that it does, and how many it has made when asked."""
    for number in range(10**6):
        pipe.step(BATCH.inputs, BATCH.targets)
        if number == 2:
            connection.send("stepping")
        if connection.poll():
            connection.recv()
            connection.send(number)


def limits_for_ever(rank: int, pipe: BlockingPipeline, connection: Connection) -> None:
    """Step; the first rank says the limits of each step."""
    for _ in range(10**6):
        slots = pipe.step(BATCH.inputs, BATCH.targets).slots
        if rank == 0:
            connection.send(slots)


def losses_and_listeners(rank: int, pipe: BlockingPipeline, connection: Connection) -> Any:
    """The losses of three steps, and the addresses on which the host's processes listen."""
    losses = [pipe.step(BATCH.inputs, BATCH.targets).losses for _ in range(3)]
    return losses, listeners()


def listeners() -> list[tuple[str, int]]:
    """The addresses and ports that accept connections on this host."""
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/thread-self/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == _LISTEN:
                words, port = local.split(":")
                address = struct.pack(
                    f"={len(words) // 8}I", *(int(words[i : i + 8], 16) for i in range(0, len(words), 8))
                )
                found.append((socket.inet_ntop(family, address), int(port, 16)))
    return found
