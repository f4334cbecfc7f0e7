"""Replicas that share forwards by claims in virtual time: the real shell, and the simulated cluster, of one case.

Messages between two ranks take a time of their own, so that no two ranks claim a forward at one instant.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from sim.shell.runs import run_ranks

from rrfp import StepResult, Topology
from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.hints.registry import create_hint
from rrfp.lab.cluster.checker import RankChecker
from rrfp.lab.cluster.cluster import Envelope, EventQueue, TimedCluster
from rrfp.lab.cluster.node import Node
from rrfp.lab.cluster.ranks import ranks_of
from rrfp.lab.emulated import EmulatedStage
from rrfp.lab.simulated_transport import SimulatedTransport
from rrfp.memory.admission import Limit
from rrfp.memory.round_trips import FollowedLimits
from rrfp.model.graph import TaskGraph
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import F, Mode, StepId, Task
from rrfp.pipeline.faces import PipelineHandle
from rrfp.pipeline.local_ranks import LocalRanks
from rrfp.pipeline.options import complete
from rrfp.runtime.context import RankSettings
from rrfp.runtime.control_tree import Shares, data_peers, peers
from rrfp.runtime.stage_runner import StageRunner
from rrfp.runtime.steps.plan import StepPlanner
from rrfp.testing.clock import TimerLane
from rrfp.transports.base import Message, MessageKind, TransportContext
from rrfp.transports.rendezvous import LocalRendezvous

#: What takes time: outputs, claims, and what a caller has passed.
_CLAIMS = {MessageKind.OFFERED, MessageKind.CLAIMED, MessageKind.GRANTED}
_TIMED = {*_CLAIMS, MessageKind.OUTPUT, MessageKind.MICROBATCH, MessageKind.ECHO}


@dataclass(frozen=True)
class ClaimedCase:
    """A job, and what its tasks, messages and microbatches take; ``given`` are the microbatches of each caller."""

    graph: TaskGraph
    given: tuple[int, ...]
    hint: str
    limit: Limit
    seed: int
    has_bytes: bool = False
    #: By rank, how much slower it is.
    slow: dict[int, float] = field(default_factory=dict)
    #: What every message takes, where a forward takes 1 and a backward 2; None: all take times of their own.
    link: float | None = None
    #: Whether limits follow the links (the shell's), and what they then are by stage, with what is claimed ahead.
    is_auto: bool = False
    limits: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()
    steps: int = 2

    @property
    def mesh(self) -> Mesh:
        return Mesh((("pp", self.graph.placement.stages), ("dp", len(self.given))))

    @property
    def homes(self) -> tuple[int, ...]:
        return tuple(replica for replica, count in enumerate(self.given) for _ in range(count))

    def seconds(self, rank: int, task: Task) -> float:
        if self.link is not None:
            return 1.0 if task.kind is F else 2.0
        return self.slow.get(rank, 1.0) * (0.5 + random.Random(f"{self.seed} {int(rank)} {task}").random())

    def latency(self, sender: int, receiver: int) -> float:
        if self.link is not None:
            return self.link
        return 0.3 * random.Random(f"{self.seed} {int(sender)} {int(receiver)}").random()

    def held(self, microbatch: int, virtual_stage: int) -> int:
        return random.Random(f"{self.seed} {microbatch} {virtual_stage}").randint(1, 9) if self.has_bytes else 0

    def core(self, stage: int) -> StageCore:
        limit = Limit(self.limits[stage]) if self.limits else self.limit
        return StageCore(self.graph, stage, create_hint(self.hint), limit)


@dataclass(frozen=True, slots=True)
class Ran:
    """By step and rank, the tasks in their order; by step how long it took.

    In the shell also, by step and stage of replica 0, the slots and the most that was held.
    """

    orders: tuple[tuple[tuple[Task, ...], ...], ...]
    seconds: tuple[float, ...]
    slots: tuple[tuple[int | None, ...], ...] = ()
    held: tuple[tuple[int, ...], ...] = ()


class SimulatedClaims(TimedCluster[Node]):
    """The cluster; one step after the other."""

    def __init__(self, case: ClaimedCase) -> None:
        self._case = case
        self._ended = 0.0
        graph, step = case.graph, partial(StepId, mode=Mode.TRAIN, microbatches=len(case.homes))
        nodes = [
            Node(rank, case.core(rank.stage), RankChecker(rank, graph, case.limit, claims=max(case.ahead, default=1)))
            for rank in ranks_of(graph.placement.stages, len(case.given))
        ]
        super().__init__(EventQueue(), nodes, [step(number) for number in range(case.steps)])

    def run(self) -> Ran:
        seconds = []
        for _ in self.steps:
            began = self.queue.now
            for node in self.nodes:
                self.open_step(node)
            self._decide(range(len(self.nodes)))
            while (touched := self.queue.instant()) is not None:
                self._decide(sorted({*touched}))
            seconds.append(self._ended - began)  # claims that came too late may still be under way
        orders = tuple(tuple(tuple(node.orders[step]) for node in self.nodes) for step in range(len(self.steps)))
        return Ran(orders, tuple(seconds))

    def _decide(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.nodes[rank].arbiter.decide()

    def opened_on(self, node: Node, step: StepId) -> ev.StepOpened:
        ahead = self._case.ahead[node.rank.stage] if self._case.ahead else 1
        pool = ev.Pool(node.rank.replica, len(self._case.given), self._case.homes, ahead)
        return ev.StepOpened(step.number, step.mode, step.microbatches, pool=pool)

    def send(self, packet: Envelope) -> None:
        after = self._case.latency(packet.sender, packet.receiver)
        self.queue.put(self.queue.now + after, packet.receiver, lambda _, packet: self.deliver(packet), packet)

    def begin(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            seconds = self._case.seconds(node.rank, node.lane[0])
            self.queue.put(self.queue.now + seconds, node.rank, self._end, seconds)

    def finish_step(self, node: Node) -> None:
        super().finish_step(node)
        self._ended = self.queue.now

    def _end(self, rank: int, seconds: float) -> None:
        self.complete(self.nodes[rank], seconds)

    def allow_step(self, nodes: Sequence[Node]) -> None:
        """The next one begins when all have ended this one."""

    def preview(self, node: Node, task: Task) -> None:
        self.apply(node, ev.Previewed(task, self._case.held(task.microbatch, task.virtual_stage)))

    def bytes_held(self, node: Node, task: Task) -> int:
        return self._case.held(task.microbatch, task.virtual_stage)


class _Recorded(EmulatedStage):
    """Keeps the order of its tasks."""

    def __init__(self, case: ClaimedCase, rank: int, spend: Callable[[float], None]) -> None:
        held = case.held if case.has_bytes else None
        super().__init__(case.graph, partial(case.seconds, rank), spend=spend, held=held)
        self.order: list[Task] = []

    def _run(self, task: Task) -> None:
        self.order.append(task)
        super()._run(task)


def run_shell_claims(case: ClaimedCase) -> Ran:
    """The same steps by the real shell. Not to be called where a loop runs."""
    return run_ranks(_run(case))


async def _run(case: ClaimedCase) -> Ran:
    met = LocalRendezvous()
    every = await asyncio.gather(*(_run_rank(case, rank, met) for rank in range(case.mesh.size)))
    steps = range(case.steps)
    orders = tuple(tuple(tuple(own[step][0]) for own in every) for step in steps)
    results = [[own[step][1] for own in every] for step in steps]
    slots, held = (tuple(getattr(of_step[0], name) for of_step in results) for name in ("slots", "peak_held"))
    return Ran(orders, tuple(max(result.seconds for result in of_step) for of_step in results), slots, held)


async def _run_rank(case: ClaimedCase, rank: int, met: LocalRendezvous) -> list[tuple[list[Task], StepResult]]:
    place, lane = Topology.at(rank, case.mesh), TimerLane()
    program = _Recorded(case, rank, lane.spend)
    context = TransportContext(
        rank,
        peers(case.graph, place, (), Shares.FORWARDS),
        "virtual",
        met,
        queue_bytes=sys.maxsize,
        data_peers=data_peers(case.graph, place, (), Shares.FORWARDS),
    )

    def latency(sender: int, receiver: int, message: Message) -> float:
        return case.latency(sender, receiver) if message.kind in _TIMED else 0.0

    async def build(_: int) -> Sequence[StageRunner]:
        seeds = list(range(len(case.given)))
        limits = FollowedLimits(case.graph, claims=True) if case.is_auto else None
        settings = RankSettings(place, depth=1, stall_after=1e6, limits=limits, replica_seeds=seeds, claims=True)
        core = case.core(place.stage)
        return [StageRunner(core, program, lane, SimulatedTransport(context, latency), settings)]

    ranks = LocalRanks([program], complete({}), build, topologies=[place], planner=StepPlanner(is_shared=True))
    ran = []
    async with PipelineHandle(ranks, "caller", f"rrfp-{rank}") as pipe:
        for _ in range(case.steps):
            program.order = []
            result = await (await pipe.step(microbatches=case.given[place.replica])).complete()
            ran.append((program.order, result))
    return ran
