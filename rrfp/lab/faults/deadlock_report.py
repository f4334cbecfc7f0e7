"""Why a pipeline stands still for good: who waits for what, who owes it, and which messages were sent and got lost.

Asked of the cores once every rank is idle and nothing is in flight. It knows neither time nor why a message is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from rrfp.arbiter.coordination import GroupMessageKind
from rrfp.core.claims import Sharing
from rrfp.core.usage import WaitCause
from rrfp.core.waiting import describe_task, unconsumed, wait_line, waiting
from rrfp.lab.cluster.node import Node
from rrfp.lab.cluster.ranks import Rank, name_of_rank
from rrfp.lab.faults.faults import AnyId, ClaimMessageId, ClaimSort, GroupMessageId, MessageId
from rrfp.model.tasks import F, StepId, Task
from rrfp.model.topology import Topology


@dataclass(frozen=True, slots=True)
class Debt:
    """A message that a rank waits for; its sender owes it."""

    message: AnyId
    #: Its sender has done all that it takes, so the message was lost.
    was_sent: bool

    def __str__(self) -> str:
        message = self.message
        what = str(message.task) if isinstance(message, MessageId) else f"{message.sort} {message.about}"
        if isinstance(message, MessageId) and message.is_credit:
            what = f"the credit for {message.task}"
        fate = "sent, and which never arrived" if self.was_sent else "has not sent"
        return f"{name_of_rank(message.receiver)} waits for {what}, which {name_of_rank(message.sender)} {fate}"


class DeadlockReport:
    """The debts of all ranks when nothing can happen any longer."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._at = {(n.rank.stage, n.rank.replica, n.rank.member): n for n in nodes}
        #: For each rank, the tasks of its step that have not completed, and those that were not enqueued.
        self._waiting = {n.rank: {entry.task: entry for entry in waiting(n.core, most=None)} for n in nodes}
        self._undone = {n.rank: {*self._waiting[n.rank], *n.core.in_flight} for n in nodes}
        #: Every message that some rank waits for, those that were sent first.
        debts = (debt for node in nodes for debt in self._debts(node))
        self.debts = sorted(debts, key=lambda debt: not debt.was_sent)

    @property
    def lost(self) -> list[AnyId]:
        """Messages that were sent and never arrived."""
        return [debt.message for debt in self.debts if debt.was_sent]

    @property
    def disputed(self) -> set[tuple[int, int]]:
        """The groups (stage, replica) in which a proposal has come to nothing."""
        return {(n.rank.stage, n.rank.replica) for n in self._nodes if n.agreement is not None and n.agreement.dispute}

    def __str__(self) -> str:
        lines = ["deadlock: every stage is idle and nothing is in flight", *map(str, self.debts)]
        for node in self._nodes:
            core = node.core
            if node.agreement is not None and (dispute := node.agreement.dispute):
                lines.append(f"{node.rank.name}: {dispute[0]} is {dispute[1]}")
                continue
            if core.in_flight:
                lines.append(f"{node.rank.name}: {core.in_flight[0]} waits for others of its group to begin it")
                continue
            for entry in waiting(core, most=1):  # other causes are debts, named above
                if not core.group.follows and entry.cause in (None, WaitCause.MEMORY) and not entry.unmeasured:
                    topology = Topology(core.stage, core.graph.placement.stages)
                    lines.append(wait_line(node.rank.name, [describe_task(core, topology, entry)]))
        return "\n  ".join(lines)

    def _debts(self, node: Node) -> Iterator[Debt]:
        step = node.step_or_none
        if step is None:
            return
        if node.core.step is not None and node.core.step.sharing is not None:
            yield from self._shared(node, step, node.core.step.sharing)
            return
        yield from self._outputs(node, step)
        yield from self._credits(node, step)
        core, rank = node.core, node.rank
        if core.group.follows:
            yield from self._orders(node, self._at[rank.stage, rank.replica, 0], step)
        yield from self._reports(node, step)

    def _reports(self, node: Node, step: StepId) -> Iterator[Debt]:
        """The followers' reports that the leader waits for."""
        rank = node.rank
        entries = self._waiting[rank]
        for task, entry in entries.items():
            for member in entry.unreported:
                follower = self._at[rank.stage, rank.replica, member]
                ready = GroupMessageId(step.number, GroupMessageKind.READY, task, follower.rank, rank)
                yield Debt(ready, self._has_all(follower, step, task))
        for member, task in sorted({late for entry in entries.values() for late in entry.unmeasured}):
            follower = self._at[rank.stage, rank.replica, member]
            held = GroupMessageId(step.number, GroupMessageKind.HELD, task, follower.rank, rank)
            yield Debt(held, self._has_run(follower, step, [task]))

    def _outputs(self, node: Node, step: StepId) -> Iterator[Debt]:
        where, rank = node.core.graph.placement.stage_of, node.rank
        owed = {source for entry in self._waiting[rank].values() for source in entry.absent}
        for source in sorted(owed, key=lambda task: (task.microbatch, task.kind, task.virtual_stage)):
            if (stage := where(source.virtual_stage)) != rank.stage:
                sender = self._at[stage, rank.replica, rank.member]
                message = MessageId(step.number, source, sender.rank, rank)
                yield Debt(message, self._has_run(sender, step, [source]))

    def _shared(self, node: Node, step: StepId, sharing: Sharing) -> Iterator[Debt]:
        """Outputs, and what is said of forwards, where replicas share them."""
        rank = node.rank

        def debt(sort: ClaimSort, forward: Task, sender: Node, receiver: Node) -> Debt:
            return Debt(ClaimMessageId(step.number, sort, forward, sender.rank, receiver.rank), was_sent=True)

        for (virtual_stage, claims), m in product(sharing.claims.items(), range(step.microbatches)):
            forward = Task(F, m, virtual_stage)
            producer = forward._replace(virtual_stage=virtual_stage - 1)
            home = self._at[0, sharing.pool.homes[m], rank.member]
            holder = self._runner(step, producer) if virtual_stage else home
            if holder is not None and holder.step_or_none is not None and holder.step.number >= step.number:
                taker = self._taker(step, holder, forward)
                if claims.holders[m] < 0:
                    yield debt("offer", forward, holder, node)
                if taker is None and claims.is_asked(m):
                    yield debt("claim", forward, node, holder)
                elif taker is node and claims.is_asked(m) and virtual_stage:
                    yield Debt(MessageId(step.number, producer, holder.rank, rank), was_sent=True)
                elif taker is not None and claims.takers[m] < 0:
                    yield debt("grant", forward, holder, node)
            for source in self._owed(rank, m, sharing.claimed_with(virtual_stage)) if claims.is_own(m) else ():
                if (sender := self._runner(step, source._replace(kind=F))) is not None:
                    message = MessageId(step.number, source, sender.rank, rank)
                    yield Debt(message, self._has_run(sender, step, [source]))

    def _owed(self, rank: Rank, microbatch: int, virtual_stages: Collection[int]) -> list[Task]:
        """What tasks of ``microbatch`` on some of the virtual stages of ``rank`` wait for from other stages."""
        where = self._nodes[0].core.graph.placement.stage_of
        tasks = {task: entry for task, entry in self._waiting[rank].items() if task.microbatch == microbatch}
        entries = [entry for task, entry in tasks.items() if task.virtual_stage in virtual_stages]
        sources = {source for entry in entries for source in entry.absent}
        return sorted(source for source in sources if where(source.virtual_stage) != rank.stage)

    def _runner(self, step: StepId, forward: Task) -> Node | None:
        """The rank that has run ``forward``, of all copies of its stage."""
        stage = self._nodes[0].core.graph.placement.stage_of(forward.virtual_stage)
        copies = [n for n in self._nodes if n.rank.stage == stage and n.num_opened > step.number]
        return next((n for n in copies if forward in n.orders[step.number] and forward not in n.lane), None)

    def _taker(self, step: StepId, holder: Node, forward: Task) -> Node | None:
        """The rank that ``holder``, which has the input of ``forward``, gave it to."""
        if holder.step != step:  # it has ended the step, so all was given
            return self._runner(step, forward)
        assert holder.core.step is not None
        assert holder.core.step.sharing is not None
        copy = holder.core.step.sharing.taker_of(forward)
        stage = self._nodes[0].core.graph.placement.stage_of(forward.virtual_stage)
        return None if copy < 0 else self._at[stage, copy, holder.rank.member]

    def _credits(self, node: Node, step: StepId) -> Iterator[Debt]:
        core, rank = node.core, node.rank
        where = core.graph.placement.stage_of
        for output, peers in unconsumed(core, most=None):
            for peer in peers:
                sender = self._at[peer, rank.replica, rank.member]
                readers = [output._replace(virtual_stage=w) for w in core.graph.successors[output.virtual_stage]]
                message = MessageId(step.number, output, sender.rank, rank, is_credit=True)
                here = [reader for reader in readers if where(reader.virtual_stage) == peer]
                yield Debt(message, self._has_run(sender, step, here))

    def _orders(self, node: Node, leader: Node, step: StepId) -> Iterator[Debt]:
        core = node.core
        if core.step is None or not self._waiting[node.rank]:
            return
        total = core.step.num_tasks
        known = core.step.num_enqueued + len(core.step.group.pending())
        current = leader.step_or_none
        sent = 0
        if current is not None and current.number >= step.number:
            sent = total - (len(self._waiting[leader.rank]) if current == step else 0)
        if known < total:
            for sequence in range(known, max(sent, known + 1)):
                yield Debt(
                    GroupMessageId(step.number, GroupMessageKind.ORDER, sequence, leader.rank, node.rank),
                    sequence < sent,
                )

    def _has_all(self, follower: Node, step: StepId, task: Task) -> bool:
        """Whether ``follower`` has got what ``task`` needs from other stages, in ``step``."""
        if follower.step_or_none != step:
            return False
        where = follower.core.graph.placement.stage_of
        entry = self._waiting[follower.rank].get(task)
        return entry is None or all(where(source.virtual_stage) == follower.rank.stage for source in entry.absent)

    def _has_run(self, node: Node, step: StepId, tasks: list[Task]) -> bool:
        current = node.step_or_none
        if current is None or current.number < step.number:
            return False
        return current.number > step.number or self._undone[node.rank].isdisjoint(tasks)
