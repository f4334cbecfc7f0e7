"""A step of replicas that share one pool of forwards by claims, with the cores that run in a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.replicas.settings import Layout
from rrfp.core import events as ev
from rrfp.core.claims import are_even
from rrfp.core.stage_core import StageCore
from rrfp.hints.registry import create_hint
from rrfp.lab.cluster.checker import RankChecker
from rrfp.lab.cluster.cluster import Envelope, EventQueue, TimedCluster
from rrfp.lab.cluster.node import Node
from rrfp.lab.cluster.ranks import Rank, ranks_of
from rrfp.memory.admission import Limit
from rrfp.model.tasks import F, Mode, StepId, Task

#: Seconds of a task on a rank that begins it at a time.
Seconds = Callable[[Rank, Task, float], float]


class PooledStep(TimedCluster[Node]):
    """One step.

    Args:
        layout: of the ranks.
        homes: by microbatch, the replica whose caller has it.
        seconds: of tasks.
        paces: by stage, seconds of a microbatch on each copy; empty: not known.
        sizes: of the microbatches, for the hint; None: untold.
        latency: seconds that a message takes from a rank of one stage to one of another, or of the same.
        depths: by stage, forwards that a copy has claimed and not begun; empty: 1.
        limits: K by stage; empty: twice the stages.
    """

    def __init__(
        self,
        layout: Layout,
        homes: Sequence[int],
        seconds: Seconds,
        paces: Sequence[Sequence[float]] = (),
        *,
        sizes: Sequence[float] | None = None,
        latency: Callable[[int, int], float] = lambda sender, receiver: 0.0,
        depths: Sequence[int] = (),
        limits: Sequence[int] = (),
    ) -> None:
        stages, replicas, graph = layout.stages, layout.replicas, layout.graph
        depths, each = depths or [1] * stages, [*map(Limit, limits or [2 * stages] * stages)]

        def node(rank: Rank) -> Node:
            limit = each[rank.stage]
            core = StageCore(graph, rank.stage, create_hint("slot-aware-pyramid"), limit)
            return Node(rank, core, RankChecker(rank, graph, limit, claims=depths[rank.stage]))

        step = StepId(0, Mode.TRAIN, len(homes))
        known = None if sizes is None else tuple(sizes)
        super().__init__(EventQueue(), [*map(node, ranks_of(stages, replicas))], [step], sizes=known)
        self._pools = [
            ev.Pool(
                rank.replica,
                replicas,
                tuple(homes),
                depths[rank.stage],
                tuple(paces[rank.stage]) if paces else (),
                sizes is None and are_even(paces),
            )
            for rank in (node.rank for node in self.nodes)
        ]
        self._seconds, self._latency = seconds, latency
        #: By rank, the seconds of its tasks, and the forwards among them.
        self.spent, self.forwards = [0.0] * len(self.nodes), [0] * len(self.nodes)
        #: Inputs of microbatches, activations and gradients that went to another replica.
        self.crossed = 0
        self._homes = homes

    def run(self) -> float:
        """How long it takes."""
        for node in self.nodes:  # which has heard from its counterparts what their callers have
            self.queue.put(self._latency(node.rank.stage, node.rank.stage), node.rank, self._open, None)
        while (touched := self.queue.instant()) is not None:
            self._decide(sorted({*touched}))
        unfinished = [node.rank.name for node in self.nodes if not node.num_finished]
        assert not unfinished, f"never ended: {', '.join(unfinished)}"
        return self.queue.now

    def opened_on(self, node: Node, step: StepId) -> ev.StepOpened:
        opened = self.opened(step)
        return ev.StepOpened(opened.step, opened.mode, opened.microbatches, opened.sizes, pool=self._pools[node.rank])

    def send(self, packet: Envelope) -> None:
        if isinstance(packet.content, ev.Arrived):
            self.crossed += packet.sender.replica != packet.receiver.replica
        seconds = self._latency(packet.sender.stage, packet.receiver.stage)
        self.queue.put(self.queue.now + seconds, packet.receiver, self._arrive, packet)

    def begin(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            task = node.lane[0]
            spent = self._seconds(node.rank, task, self.queue.now)
            self.spent[node.rank] += spent
            self.forwards[node.rank] += task.kind is F
            if task.kind is F and not task.virtual_stage:
                self.crossed += self._homes[task.microbatch] != node.rank.replica
            self.queue.put(self.queue.now + spent, node.rank, self._complete, spent)

    def allow_step(self, nodes: Sequence[Node]) -> None:
        """There is one."""

    def _open(self, rank: int, _: None) -> None:
        self.open_step(self.nodes[rank])

    def _arrive(self, rank: int, packet: Envelope) -> None:
        self.deliver(packet)

    def _complete(self, rank: int, seconds: float) -> None:
        self.complete(self.nodes[rank], seconds)

    def _decide(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.nodes[rank].arbiter.decide()
