"""``limit="auto"``: what ranks measure, when the limit follows, and what does not depend on it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from runtime.ranks import virtual_ranks
from runtime.toys import data, loss_fn, stages

import rrfp
from rrfp.errors import ConfigError, PipelineAborted
from rrfp.lab.emulated import Durations
from rrfp.model.graph import TaskGraph
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import Kind, Task
from rrfp.testing.clock import EmulatedStage, SimulatedTransport, TimerLane, run_virtual
from rrfp.transports.base import Channel, Message, MessageKind

#: Seconds of one microbatch's tasks on a stage, F + B: numbers that floats add exactly.
PERIOD = 25 / 64


def seconds_of(task: Task) -> float:
    return 9 / 64 if task.kind is Kind.F else 16 / 64


class Links:
    """Links between stages of which each takes its own time, both ways, for every message."""

    def __init__(self, seconds: Mapping[tuple[int, int], float] | None = None) -> None:
        self.seconds = dict(seconds or {})
        self.sent = Counter[MessageKind]()

    def latency(self, stage: int, peer: int, message: Message) -> float:
        self.sent[message.kind] += 1
        return self.seconds.get((min(stage, peer), max(stage, peer)), 0.0)


def emulated(links: Links, stages: int, durations: Durations = seconds_of, **options: Any) -> Any:
    graph, lanes = TaskGraph.chain(stages), [TimerLane() for _ in range(stages)]
    programs = [EmulatedStage(graph, durations, num_bytes=8, spend=lane.spend) for lane in lanes]
    transport = partial(SimulatedTransport, latency=links.latency)
    defaults = {"transport": transport, "lane": lanes.__getitem__, "limit": "auto", "hint": "bf"}
    return rrfp.local(programs, loop="caller", **{**defaults, **options})


def limits_of(
    links: Links, stages: int, steps: int, change: Callable[[int], None] = lambda step: None, **options: Any
) -> list[tuple[int, ...]]:
    """The limits of each step; ``change`` is called before each."""

    async def main() -> list[tuple[int, ...]]:
        limits = []
        async with emulated(links, stages, **options) as pipe:
            for step in range(steps):
                change(step)
                limits.append((await (await pipe.step(microbatches=12)).complete()).slots)
        return limits

    return run_virtual(main())


def test_where_nothing_is_slow_the_limits_are_those_of_1f1b() -> None:
    assert limits_of(Links(), 4, 3) == [(4, 3, 2, 1)] * 3


def test_where_nothing_is_slow_a_step_takes_what_it_takes_with_1f1b() -> None:
    async def seconds(limit: str) -> list[float]:
        async with emulated(Links(), 4, limit=limit) as pipe:
            return [(await (await pipe.step(microbatches=16)).complete()).seconds for _ in range(4)]

    assert run_virtual(seconds("auto")) == run_virtual(seconds("1f1b"))


def test_it_follows_a_link_that_becomes_slow_and_fast_again_within_five_steps() -> None:
    links = Links()

    def change(step: int) -> None:
        links.seconds[1, 2] = 1.2 * PERIOD if 3 <= step < 9 else 0.0

    limits = limits_of(links, 4, 15, change)
    fast, slow = (4, 3, 2, 1), (7, 6, 2, 1)  # three periods there and back
    assert limits[:4] == [fast] * 4
    assert limits[8:10] == [slow] * 2  # five steps after the first slow one
    assert limits[14] == fast  # and after the first fast one


def test_it_moves_by_doubling_at_most() -> None:
    limits = limits_of(Links({(1, 2): 4.9 * PERIOD}), 3, 5)
    assert limits == [(3, 2, 1), (6, 4, 1), (12, 8, 1), (13, 12, 1), (13, 12, 1)]


def test_one_step_that_was_slow_changes_nothing() -> None:
    links = Links()

    def change(step: int) -> None:
        links.seconds[0, 1] = 2 * PERIOD if step == 2 else 0.0

    assert limits_of(links, 3, 6, change) == [(3, 2, 1)] * 6


def test_a_slow_link_costs_one_round_trip_a_step() -> None:
    async def seconds(links: Links, steps: int, limit: str) -> float:
        async with emulated(links, 4, limit=limit) as pipe:
            for _ in range(steps):
                result = await (await pipe.step(microbatches=16)).complete()
            return float(result.seconds)

    undisturbed = run_virtual(seconds(Links(), 1, "1f1b"))
    latency = 1.2 * PERIOD
    disturbed = run_virtual(seconds(Links({(1, 2): latency}), 6, "auto"))
    # The loss and the reports cross the link as well; their messages are no part of the pipeline.
    assert disturbed == pytest.approx(undisturbed + 2 * latency)
    assert run_virtual(seconds(Links({(1, 2): latency}), 6, "1f1b")) > 1.5 * disturbed


def test_a_user_can_cap_it() -> None:
    links = Links({(1, 2): 1.2 * PERIOD})
    capped = limits_of(links, 3, 4, limit=rrfp.Limit(4, auto=True))
    assert capped[-1] == (4, 4, 1)
    assert limits_of(links, 3, 4)[-1] == (6, 5, 1)


def test_bytes_bound_it_as_well() -> None:
    links = Links({(1, 2): 1.2 * PERIOD})

    async def held() -> tuple[tuple[int, ...], tuple[int, ...]]:
        async with emulated(links, 3, limit=rrfp.Limit(bytes=24, auto=True)) as pipe:
            for _ in range(4):
                result = await (await pipe.step(microbatches=12)).complete()
        return result.slots, result.peak_bytes

    slots, most = run_virtual(held())
    assert slots == (6, 5, 1)
    assert max(most) <= 24


def test_where_durations_differ_it_leaves_more_room() -> None:
    def ragged(task: Task) -> float:
        return seconds_of(task) * (2.0 if task.microbatch % 2 else 0.5)

    even = limits_of(Links(), 4, 4)[-1]
    uneven = limits_of(Links(), 4, 4, durations=ragged)[-1]
    assert all(more > few for more, few in zip(uneven[:3], even[:3], strict=True))


def test_a_rank_takes_its_own_limit_with_several_chunks() -> None:
    async def last() -> tuple[int | None, ...]:
        graph, lanes = TaskGraph.chain(2, chunks=2), [TimerLane() for _ in range(2)]
        programs = [EmulatedStage(graph, seconds_of, num_bytes=8, spend=lane.spend) for lane in lanes]
        links = Links({(0, 1): 1.2 * 2 * PERIOD})
        options: dict[str, Any] = {
            "transport": partial(SimulatedTransport, latency=links.latency), "lane": lanes.__getitem__, "chunks": 2
        }  # fmt: skip
        async with rrfp.local(programs, loop="caller", limit="auto", hint="bf", **options) as pipe:
            for _ in range(4):
                result = await (await pipe.step(microbatches=12)).complete()
        return result.slots

    # N, and three periods for each of the three crossings below chunk 0 of stage 0, and two below that of stage 1.
    assert run_virtual(last()) == (2 * (2 + 9), 2 * (2 + 6))


def test_other_limits_send_no_echo_and_report_nothing_more() -> None:
    sent = {}
    for limit in ("1f1b", "auto"):
        links = Links()
        limits_of(links, 3, 2, limit=limit)
        sent[limit] = links.sent
    assert sent["1f1b"][MessageKind.ECHO] == 0
    assert 0 < sent["auto"][MessageKind.ECHO] <= 2 * 2 * 2 * 8  # steps, edges, there and back, a few
    others = {kind: counts for kind, counts in sent["auto"].items() if kind is not MessageKind.ECHO}
    assert others == dict(sent["1f1b"])


def test_one_line_says_what_was_chosen_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        limits_of(Links({(1, 2): 1.2 * PERIOD}), 3, 6)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("limit auto")]
    why = "round trips: stages 1-2 938 ms (2.4 periods); period 391 ms, spread 0%"
    assert lines == [
        f"limit auto: from the next step on stages may hold 6 4 1 microbatches, until now 3 2 1; {why}",
        f"limit auto: from the next step on stages may hold 6 5 1 microbatches, until now 6 4 1; {why}",
    ]


def test_evaluations_take_the_limit_and_teach_it_nothing() -> None:
    async def main() -> list[tuple[int, ...]]:
        async with emulated(Links({(1, 2): 1.2 * PERIOD}), 3) as pipe:
            calls = (pipe.evaluate, pipe.evaluate, pipe.step, pipe.evaluate)
            return [(await (await call(microbatches=12)).complete()).slots for call in calls]

    assert run_virtual(main()) == [(3, 2, 1), (3, 2, 1), (3, 2, 1), (6, 4, 1)]


def test_what_it_does_not_know_is_refused_by_name() -> None:
    graph, lane = TaskGraph.chain(1), TimerLane()
    program = EmulatedStage(graph, seconds_of, num_bytes=8, spend=lane.spend)
    with pytest.raises(ConfigError, match="auto must be False with rule 'paper'"):
        rrfp.Limit(auto=True, rule="paper")
    with pytest.raises(ConfigError, match="limit is 'auto' on a graph or a placement"):
        rrfp.local([program, program], placement=[0, 1, 1], chunks=None, limit="auto")


def test_the_trace_has_the_limits_of_each_step() -> None:
    async def main() -> Any:
        async with emulated(Links({(0, 1): 1.2 * PERIOD}), 2) as pipe:
            for _ in range(5):
                result = await pipe.step(microbatches=12)
            return result.trace.limits, (await result.complete()).slots

    limits, slots = run_virtual(main())
    assert limits == dict(enumerate(slots)) == {0: 5, 1: 1}


def test_gradients_do_not_depend_on_it_bit_by_bit() -> None:
    def gradients(limit: str) -> list[bytes]:
        batch, modules = data(12), stages(3)
        options: dict[str, Any] = {"loss_fn": loss_fn, "deterministic": True, "limit": limit}
        with rrfp.local(modules, **options) as pipe:
            for _ in range(3):
                pipe.step(batch.inputs, batch.targets)
        parameters = [each for module in modules for each in module.parameters()]
        return [each.grad.numpy().tobytes() for each in parameters if each.grad is not None]

    assert gradients("auto") == gradients("1f1b")


def group_limits(leaders: float, others: float) -> list[tuple[int | None, ...]]:
    """The limits on each of four ranks, two a stage, whose leaders are ``leaders`` periods apart, the others theirs."""
    links = Links({(0, 2): leaders * PERIOD, (1, 3): others * PERIOD})
    transport = partial(SimulatedTransport, latency=links.latency)

    async def run(pipeline: rrfp.Pipeline) -> tuple[int | None, ...]:
        async with pipeline as pipe:
            for _ in range(5):
                result = await (await pipe.step(microbatches=12)).complete()
            return result.slots

    async def main() -> list[tuple[int | None, ...]]:
        mesh = Mesh((("pp", 2), ("tp", 2)))
        pipelines = virtual_ranks(mesh, seconds_of, transport, limit="auto", hint="bf", lock_watch=False)
        return await asyncio.gather(*map(run, pipelines))

    return run_virtual(main())


def test_a_group_has_the_limit_of_what_its_leader_measured() -> None:
    assert group_limits(1.2, 0.0) == [(5, 1)] * 4
    assert group_limits(0.0, 1.2) == [(2, 1)] * 4


class FalseEcho(SimulatedTransport):
    """Rank 1 answers an echo that nobody sent."""

    body: Mapping[str, Any]

    async def send(self, peer: int, message: Message) -> None:
        if message.kind is MessageKind.OUTPUT and self.context.rank == 1:
            await super().send(peer, Message(Channel.CONTROL, MessageKind.ECHO, body=self.body))
        await super().send(peer, message)


@pytest.mark.parametrize("body", [{}, {"number": -1, "back": True}, {"number": "0", "back": False}, {"back": None}])
def test_an_echo_that_nobody_sent_ends_the_step_and_names_its_rank(body: dict[str, Any]) -> None:
    async def main() -> None:
        async with emulated(Links(), 2, transport=type("Said", (FalseEcho,), {"body": body})) as pipe:
            await pipe.step(microbatches=2)

    with pytest.raises(PipelineAborted, match="ProtocolError: rank 1 sent back an echo that it did not get"):
        run_virtual(main())
