"""The latencies between ranks, and the bare ones beside them, measured in turns."""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from statistics import median

from benchmarks.dispatch.peer import Peer, rendezvous_in, sent_at
from benchmarks.dispatch.ranks import GAP_S, MESSAGE_BYTES, TRANSPORTS, FilingClock, Rank, Receiver, Sender
from benchmarks.shared.figures import Spread
from rrfp.model.tasks import Kind, Task
from rrfp.pipeline.loop_thread import LoopThread
from rrfp.trace.spans import StepTrace, merge
from rrfp.transports.rendezvous import LocalRendezvous

FILED, FILED_NICE, FILED_ZMQ = "filed, shm", "filed, nice 10, shm", "filed, zmq/ipc"
SAME_LOOP, TWO_LOOPS = "started, inproc, same loop", "started, inproc, two loops"
STARTED, STARTED_ZMQ = "started, shm", "started, zmq/ipc"
IDLE_INPROC, IDLE, IDLE_ZMQ = "lane idle, inproc, same loop", "lane idle, shm", "lane idle, zmq/ipc"
BARE_HOP, BARE_SOCKET, BARE_ZMQ = "bare thread hop", "bare SEQPACKET + thread hop", "bare zmq, round trip / 2"

#: Rows, in the order of the table.
ROWS = (
    *(FILED, FILED_NICE, FILED_ZMQ),
    *(SAME_LOOP, TWO_LOOPS, BARE_HOP),
    *(STARTED, BARE_SOCKET, STARTED_ZMQ, BARE_ZMQ),
    *(IDLE_INPROC, IDLE, IDLE_ZMQ),
)

#: Takes so many samples; returns seconds by row.
Sampler = Callable[[int], Mapping[str, list[float]]]

#: By row, the samples of each round.
Samples = Mapping[str, Sequence[Sequence[float]]]


def spreads_of(samples: Samples) -> dict[str, Spread]:
    """By row, over all rounds."""
    return {row: Spread.of([seconds for each in rounds for seconds in each]) for row, rounds in samples.items()}


def above(samples: Samples, row: str, bare: str) -> float:
    """Seconds by which the median of ``row`` is above that of ``bare`` in the same round; median over the rounds."""
    return median(median(mine) - median(other) for mine, other in zip(samples[row], samples[bare], strict=True))


def measure(rounds: int, messages: int, busy_messages: int) -> Samples:
    """Every latency; a round takes some samples of each, one after the other."""
    with ExitStack() as stack:
        samplers = _samplers(stack, messages, busy_messages)
        samples: dict[str, list[list[float]]] = {row: [] for row in ROWS}
        for sampler, _ in samplers:
            sampler(5)  # warm up
        # A full collection of what torch's import leaves stops all threads for 0.1 s, in whichever row it falls.
        gc.freeze()
        stack.callback(gc.unfreeze)
        for _ in range(rounds):
            for sampler, count in samplers:
                for row, seconds in sampler(count).items():
                    samples[row].append(seconds)
        return samples


def _samplers(stack: ExitStack, messages: int, busy_messages: int) -> list[tuple[Sampler, int]]:
    """Each with its number of messages; those that are compared follow one another."""
    pairs = ProcessPairs(stack)
    same_loop, two_loops = local_pair(stack, loops=1), local_pair(stack, loops=2)
    hop = hops(stack)
    return [
        (lambda count: {FILED: pairs.filed("shm busy", count)}, busy_messages),
        (lambda count: {FILED_NICE: pairs.filed("shm nice", count)}, busy_messages),
        (lambda count: {FILED_ZMQ: pairs.filed("zmq/ipc busy", count)}, busy_messages),
        (lambda count: _of_trace(same_loop(count), SAME_LOOP, IDLE_INPROC), messages),
        (lambda count: {BARE_HOP: hop(count)}, messages),
        (lambda count: {TWO_LOOPS: starts(two_loops(count))}, messages),
        (lambda count: _of_trace(pairs.idle("shm idle", count), STARTED, IDLE), messages),
        (lambda count: {BARE_SOCKET: pairs.bare(count)}, messages),
        (lambda count: _of_trace(pairs.idle("zmq/ipc idle", count), STARTED_ZMQ, IDLE_ZMQ), messages),
        (lambda count: {BARE_ZMQ: [trip / 2 for trip in pairs.peer.round_trips(count, GAP_S)]}, messages),
    ]


def _of_trace(trace: StepTrace, started: str, idle: str) -> dict[str, list[float]]:
    return {started: starts(trace), idle: idle_times(trace)}


def sends(trace: StepTrace) -> dict[Task, float]:
    """When each message was sent."""
    return {message.task: message.sent for message in trace.messages if message.sent is not None}


def starts(trace: StepTrace) -> list[float]:
    """Seconds from each message's sending to the start of the task that it made ready."""
    started = {span.task.microbatch: span.start for span in trace.tasks if span.stage == 1}
    return [started[task.microbatch] - sent for task, sent in sends(trace).items() if task.kind is Kind.F]


def idle_times(trace: StepTrace) -> list[float]:
    """Seconds between the tasks of stage 0, which are ready from the start of the step."""
    spans = sorted((span.start, span.end) for span in trace.tasks if span.stage == 0)
    return [start - end for (_, end), (start, _) in pairwise(spans)]


def local_pair(stack: ExitStack, *, loops: int) -> Callable[[int], StepTrace]:
    """A step over inproc, with the two ranks on one loop or on two."""
    threads = [LoopThread(f"loop-{index}") for index in range(loops)]
    for thread in threads:
        stack.callback(thread.close)
    met = LocalRendezvous()
    programs = (Sender(), Receiver())
    ranks = [
        Rank(stage, threads[stage % loops], program, f"inproc-{loops}", lambda: met, transport="inproc")
        for stage, program in enumerate(programs)
    ]
    for rank in ranks:
        rank.wait()
    stack.callback(lambda: [closing.result() for closing in [rank.close() for rank in ranks]])

    def step(messages: int) -> StepTrace:
        steps = [rank.step(messages) for rank in ranks]
        return merge([each.result() for each in steps])

    return step


class ProcessPairs:
    """Stage 1 of pairs whose stage 0 is in another process, over each transport."""

    #: With the transport of each.
    PAIRS: Mapping[str, str] = {
        "shm idle": "shm",
        "shm busy": "shm",
        "shm nice": "shm",
        "zmq/ipc idle": "zmq/ipc",
        "zmq/ipc busy": "zmq/ipc",
    }

    def __init__(self, stack: ExitStack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rrfp-"))
        self.peer = Peer(folder, self.PAIRS)
        stack.callback(self.peer.join)
        self._thread = LoopThread("receiver")
        stack.callback(self._thread.close)
        self._clocks = {pair: FilingClock() for pair in self.PAIRS}
        self._ranks = {pair: self._rank(folder, pair) for pair in self.PAIRS}
        for rank in self._ranks.values():
            rank.wait()
        stack.callback(self._close)

    def _rank(self, folder: str, pair: str) -> Rank:
        clock = self._clocks[pair]
        return Rank(
            1,
            self._thread,
            Receiver(None if pair.endswith("idle") else clock.enough),
            pair,
            partial(rendezvous_in, folder, pair),
            hint=lambda: clock,
            lane_nice=10 if pair.endswith("nice") else 0,
            transport=TRANSPORTS[self.PAIRS[pair]],
        )

    def _close(self) -> None:
        self.peer.begin_close()
        for closing in [rank.close() for rank in self._ranks.values()]:
            closing.result()

    def idle(self, pair: str, messages: int) -> StepTrace:
        """A step of both ranks."""
        self._clocks[pair].forget()
        self.peer.begin_step(pair, messages)
        step = self._ranks[pair].step(messages)
        return merge([self.peer.step_trace(), step.result()])

    def filed(self, pair: str, messages: int) -> list[float]:
        """Arrival to filed, the lane busy; the first message is what makes it busy."""
        trace = self.idle(pair, messages + 1)
        filed = self._clocks[pair].filed
        return [filed[task] - sent for task, sent in sends(trace).items() if task.microbatch != 0]

    def bare(self, count: int) -> list[float]:
        """Seconds from the sending on a bare socket to a call on the loop, to which a thread hands the message."""
        samples: list[float] = []
        done = threading.Event()

        def arrive(sent: float) -> None:
            samples.append(time.monotonic() - sent)
            if len(samples) == count:
                done.set()

        def read() -> None:
            for _ in range(count):
                self._thread.loop.call_soon_threadsafe(arrive, sent_at(self.peer.bare.recv(MESSAGE_BYTES)))

        reader = threading.Thread(target=read, name="reader", daemon=True)
        reader.start()
        self.peer.begin_bare(count)
        reader.join()
        done.wait()
        return samples


def hops(stack: ExitStack) -> Callable[[int], list[float]]:
    """Seconds from `call_soon_threadsafe` on another thread to the call."""
    thread = LoopThread("hop")
    stack.callback(thread.close)

    def sample(count: int) -> list[float]:
        samples: list[float] = []
        done = threading.Event()

        def arrive(sent: float) -> None:
            samples.append(time.monotonic() - sent)
            done.set()

        for _ in range(count):
            time.sleep(GAP_S)
            done.clear()
            thread.loop.call_soon_threadsafe(arrive, time.monotonic())
            done.wait()
        return samples

    return sample
