"""What is particular to simulated: arrival is the time of sending plus the latency, exactly, in virtual time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import transports.makers as makers
from sim.tables import table

from rrfp.costs import CostTable
from rrfp.errors import ConfigError, PeerLostError, TransportError
from rrfp.lab.simulated_transport import Latency, SimulatedTransport, table_latency
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.testing.clock import run_virtual
from rrfp.testing.transport_checks import PairOptions
from rrfp.testing.transport_checks.pair import data, index_of, note
from rrfp.transports.base import Channel, Message, MessageKind, Transport
from rrfp.transports.inproc import InprocTransport


def now() -> float:
    return asyncio.get_running_loop().time()


def by_index(*latencies: float) -> Latency:
    """Tensors take what their index says, control messages nothing."""

    def latency(stage: int, peer: int, message: Message) -> float:
        return 0.0 if message.channel is Channel.CONTROL else latencies[index_of(message)]

    return latency


async def receive(transport: Transport, count: int) -> list[tuple[int, float]]:
    """The indices of the next messages, each with the time at which it came."""
    return [(index_of(await transport.receive()), now()) for _ in range(count)]


def test_a_message_arrives_at_its_sending_plus_its_latency_to_the_last_bit() -> None:
    latencies = (0.1, 0.2, 0.7)

    async def main() -> tuple[list[float], list[tuple[int, float]]]:
        async with makers.simulated(by_index(*latencies))(PairOptions()) as pair:
            receiving = asyncio.create_task(receive(pair.right, len(latencies)))
            sent = []
            for index in range(len(latencies)):
                await asyncio.sleep(0.3)
                sent.append(now())
                await pair.left.send(1, data(torch.ones(3), index=index))
                assert now() == sent[-1], "sending takes no time"
            return sent, await receiving

    sent, received = run_virtual(main())
    assert received == [(i, when + late) for i, (when, late) in enumerate(zip(sent, latencies, strict=True))]


def test_messages_of_one_channel_overtake_each_other_where_their_latencies_differ() -> None:
    async def main() -> list[tuple[int, float]]:
        async with makers.simulated(by_index(5, 1, 3, 3, 0))(PairOptions()) as pair:
            for index in range(5):
                await pair.left.send(1, data(index=index))
            return await receive(pair.right, 5)

    assert run_virtual(main()) == [(4, 0), (1, 1), (2, 3), (3, 3), (0, 5)]


def test_control_takes_no_time_by_default() -> None:
    async def main() -> list[tuple[int, float]]:
        async with makers.simulated(by_index(1))(PairOptions()) as pair:
            await pair.left.send(1, data(index=0))
            await pair.left.send(1, note(7))
            return await receive(pair.right, 2)

    assert run_virtual(main()) == [(7, 0), (0, 1)]


def test_what_is_on_its_way_counts_as_queued() -> None:
    async def main() -> list[float]:
        async with makers.simulated(by_index(4, 4))(PairOptions(queue_bytes=1000)) as pair:
            receiving = asyncio.create_task(receive(pair.right, 2))
            times = []
            for index in range(2):
                await pair.left.send(1, data(torch.zeros(900, dtype=torch.uint8), index=index))
                times.append(now())
            assert pair.left.statistics().queued_bytes == 900
            await receiving
            assert pair.left.statistics().queued_bytes == 0
            return [*times, now()]

    assert run_virtual(main()) == [0, 4, 8]


def test_closing_lets_what_is_on_its_way_arrive() -> None:
    async def main() -> list[tuple[int, float]]:
        async with makers.simulated(by_index(2, 1))(PairOptions()) as pair:
            for index in range(2):
                await pair.left.send(1, data(index=index))
            await pair.left.close()
            pair.left.abort()  # nothing is left to abort
            assert now() == 0
            return await receive(pair.right, 2)

    assert run_virtual(main()) == [(1, 1), (0, 2)]


def test_aborting_loses_what_is_on_its_way_and_nothing_that_has_arrived() -> None:
    async def main() -> tuple[list[tuple[int, float]], float]:
        async with makers.simulated(by_index(1, 3))(PairOptions()) as pair:
            for index in range(2):
                await pair.left.send(1, data(index=index))
            await asyncio.sleep(2)
            pair.left.abort()
            arrived = await receive(pair.right, 1)
            with pytest.raises(PeerLostError):
                await pair.right.receive()
            with suppress(TimeoutError):
                async with asyncio.timeout(10):
                    await pair.right.receive()
            return arrived, now()

    assert run_virtual(main()) == ([(0, 2)], 12)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_latency_that_is_no_duration_is_refused(seconds: float) -> None:
    async def main() -> None:
        async with makers.simulated(by_index(seconds))(PairOptions()) as pair:
            with pytest.raises(ConfigError, match=r"latency is .* s for F0@0 to rank 1, must be finite and >= 0"):
                await pair.left.send(1, data(index=0))

    run_virtual(main())


async def test_ends_on_two_loops_are_refused() -> None:
    left, right = map(SimulatedTransport, makers.contexts())
    failed: list[Exception] = []

    async def elsewhere() -> None:
        try:
            await right.start()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    thread.start()
    with pytest.raises(ConfigError, match="rank 1 is on another event loop; simulated joins the ranks of one"):
        await left.start()
    await asyncio.to_thread(thread.join)
    assert len(failed) == 1


def test_it_does_not_meet_inproc() -> None:
    left, right = makers.contexts(connect_timeout_s=5.0)

    async def main() -> Sequence[Any]:
        ends = InprocTransport(left), SimulatedTransport(right)
        return await asyncio.gather(*(end.start() for end in ends), return_exceptions=True)

    assert [type(failure) for failure in run_virtual(main())] == [TransportError, TransportError]


def test_a_table_gives_tensors_the_row_of_their_edge_and_everything_else_nothing() -> None:
    ones = table([[1, 1]] * 3, [[1, 1]] * 3)
    there, back = [[1, 2], [3, 4]], [[5, 6], [7, 8]]
    latency = table_latency(
        CostTable(3, 1, "looped", 2, ones.forward, ones.backward, None, there, back)  # type: ignore[arg-type]
    )
    output = partial(Message, Channel.FORWARD, MessageKind.OUTPUT, StepId(0, Mode.TRAIN, 2))
    assert latency(0, 1, output(Task(Kind.F, 1, 0))) == 2
    assert latency(1, 2, output(Task(Kind.F, 0, 1))) == 3
    assert latency(1, 0, output(Task(Kind.B, 0, 1))) == 5
    assert latency(2, 1, output(Task(Kind.B, 1, 2))) == 8
    consumed = Message(Channel.CONTROL, MessageKind.CONSUMED, StepId(0, Mode.FORWARD, 2), Task(Kind.F, 0, 1))
    assert latency(1, 0, consumed) == 0
    assert latency(1, 0, Message(Channel.CONTROL, MessageKind.PROBE)) == 0
