"""The process at the other end of a benchmark: stage 0 of several pairs, and the sending ends of bare sockets."""

from __future__ import annotations

import gc
import multiprocessing
import socket
import struct
import time
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import zmq
from torch.distributed import FileStore  # type: ignore[attr-defined]

from benchmarks.dispatch.ranks import GAP_S, MESSAGE_BYTES, TRANSPORTS, FilingClock, Rank, Sender
from rrfp.lab.emulated import sleep_until
from rrfp.pipeline.loop_thread import LoopThread
from rrfp.trace.plain import from_plain, to_plain
from rrfp.trace.spans import StepTrace
from rrfp.transports.base import Rendezvous
from rrfp.transports.rendezvous import StoreRendezvous

#: A bare message: when it was sent, by `time.monotonic`, and as many bytes as the others' have.
_BARE = struct.Struct(f"d{MESSAGE_BYTES - 8}x")


def rendezvous_in(folder: str, run_id: str) -> Rendezvous:
    """Where two processes meet that share ``folder``. Called on the loop that uses it."""
    return StoreRendezvous(FileStore(f"{folder}/store", -1), run_id=run_id)


class Peer:
    """Starts and commands the process.

    Args:
        folder: of this run alone; short, since sockets live in it.
        pairs: the pairs that it is stage 0 of, each with its transport; each needs a stage 1 of this name.

    Attributes:
        bare: the receiving end of a SEQPACKET socket; see `begin_bare`.
    """

    def __init__(self, folder: str, pairs: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.bare, sending = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = context.Process(target=_serve, args=(theirs, sending, folder, dict(pairs)), daemon=True)
        self._process.start()
        theirs.close()
        sending.close()
        self._zmq = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._zmq.socket(zmq.PAIR)
        self._socket.connect(f"ipc://{folder}/echo")

    def begin_step(self, pair: str, messages: int) -> None:
        """Stage 0 of ``pair`` runs a step; `step_trace` tells how it went."""
        self._pipe.send(("step", pair, messages))

    def step_trace(self) -> StepTrace:
        """Wait for the step that was begun."""
        return from_plain(self._pipe.recv())

    def round_trips(self, count: int, pause_s: float) -> list[float]:
        """Seconds of bare zmq round trips, with pauses between them as between the messages of a step."""
        self._pipe.send(("echo", count, None))
        message, samples = bytes(MESSAGE_BYTES), []
        for _ in range(count):
            time.sleep(pause_s)
            started = time.monotonic()
            self._socket.send(message)
            self._socket.recv()
            samples.append(time.monotonic() - started)
        return samples

    def begin_bare(self, count: int) -> None:
        """Messages leave on the bare socket, with the pauses of a step's; `sent_at` reads them."""
        self._pipe.send(("bare", count, None))

    def begin_close(self) -> None:
        """Stage 0 of every pair leaves, as soon as its stage 1 does."""
        self._pipe.send(("close", None, None))

    def join(self) -> None:
        """Wait for the end of the process, or force it."""
        self._zmq.destroy(linger=0)
        self.bare.close()
        self._process.join(10)
        self._process.kill()
        self._process.join()


def sent_at(message: bytes) -> float:
    """When a bare message was sent."""
    (sent,) = _BARE.unpack(message)
    return float(sent)


def _serve(pipe: Connection, bare: socket.socket, folder: str, pairs: Mapping[str, str]) -> None:
    thread = LoopThread("sender")
    ranks = {
        pair: Rank(
            0,
            thread,
            Sender(),
            pair,
            partial(rendezvous_in, folder, pair),
            hint=FilingClock,
            transport=TRANSPORTS[transport],
        )
        for pair, transport in pairs.items()
    }
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.bind(f"ipc://{folder}/echo")
    gc.freeze()  # as in the process that measures
    while True:
        command: tuple[str, Any, Any] = pipe.recv()
        if command[0] == "step":
            pipe.send(to_plain(ranks[command[1]].step(command[2]).result()))
        elif command[0] == "echo":
            for _ in range(command[1]):
                socket.send(socket.recv())
        elif command[0] == "bare":
            for _ in range(command[1]):
                sleep_until(time.monotonic() + GAP_S)
                bare.send(_BARE.pack(time.monotonic()))
        else:
            break
    for closing in [rank.close() for rank in ranks.values()]:
        closing.result()
    thread.close()
    context.destroy(linger=0)
