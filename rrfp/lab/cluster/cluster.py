"""A simulated cluster: the real cores of all ranks of a job, joined together.

What a core asks for is done here: outputs, credits and messages inside groups become packets, tasks go to lanes, steps
follow each other, and the checker of each rank sees it. A subclass adds time and a network: it says when a packet
arrives and when a task ends. `rrfp.lab.cluster.simulation` simulates tensor-parallel groups on a cost table,
`rrfp.lab.cluster.random_run` lets anything happen in any order, `rrfp.lab.faults.cluster` lets things go wrong.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from rrfp.arbiter.arbiter import Arbiter, PauseTimer
from rrfp.arbiter.coordination import AgreementArbiter, GroupMessage, LeaderProtocol
from rrfp.arbiter.offers import Offers, may_offer
from rrfp.core import events as ev
from rrfp.core.group_step import GroupMembership
from rrfp.core.usage import WaitCause
from rrfp.engine.engine import OfferedSlot
from rrfp.lab.cluster.coordination import CoordinationName
from rrfp.lab.cluster.node import Node
from rrfp.lab.cluster.ranks import Rank
from rrfp.model.tasks import Mode, StepId, Task

NodeT = TypeVar("NodeT", bound=Node)


class RankGroup(Generic[NodeT]):
    """The members, leader first."""

    # Coupled, they begin a task when the last of them reaches it, as with collectives.

    def __init__(self, nodes: Sequence[NodeT], *, coupled: bool) -> None:
        self.nodes = nodes
        self._coupled = coupled and len(nodes) > 1
        #: By step: the order of the group; the first member to reach an index sets the task there.
        self._orders: dict[int, list[Task]] = {}
        #: By step and index in the order: the members whose lanes have reached it.
        self._present: dict[tuple[int, int], list[NodeT]] = {}
        self._waiting: list[NodeT] = []

    def may_open(self, node: NodeT) -> bool:
        """Whether all have opened the step before; else `take_waiting` returns it later."""
        if all(other.num_opened >= node.num_opened for other in self.nodes):
            return True
        self._waiting.append(node)
        return False

    def take_waiting(self) -> list[NodeT]:
        """Members that waited to open a step and now may."""
        if not self._waiting:
            return []
        opened = min(node.num_opened for node in self.nodes)
        free = [node for node in self._waiting if node.num_opened <= opened]
        self._waiting = [node for node in self._waiting if node.num_opened > opened]
        return free

    def enqueue(self, node: NodeT, task: Task) -> Task | None:
        """Returns the task that another member has at this index, if it differs."""
        index = len(node.order)
        node.order.append(task)
        if len(self.nodes) == 1:
            return None
        order = self._orders.setdefault(node.step.number, [])
        if index == len(order):
            order.append(task)
        return None if order[index] == task else order[index]

    def reach(self, node: NodeT) -> Sequence[NodeT]:
        """The lane reaches its next task; returns the members that begin theirs."""
        index = node.num_begun
        node.num_begun += 1
        if not self._coupled:
            return (node,)
        present = self._present.setdefault((node.step.number, index), [])
        present.append(node)
        if len(present) < len(self.nodes):
            return ()
        return self._present.pop((node.step.number, index))


#: What ranks say to share forwards: see `rrfp.core.claims`.
ClaimMessage = ev.Offered | ev.Claimed | ev.Granted
Content = ev.Arrived | ev.Consumed | ev.BegunReported | ClaimMessage | GroupMessage


#: Called with the rank and the argument that were put into the queue.
Handler = Callable[[int, Any], None]


class EventQueue:
    """Virtual time: all that happens at one instant comes before any rank decides, in the order of `put`."""

    def __init__(
        self,
        # For ranks that may stand still or end, when a rank takes in what happens to it at a time: then,
        # later while it stands still, never (None) once it has ended. None: all ranks are always there.
        availability: Callable[[int, float], float | None] | None = None,
    ) -> None:
        self.now = 0.0
        self.num_happened = 0
        self._availability = availability
        # (time, order of insertion, rank, handler, its argument): the order makes the heap total.
        self._heap: list[tuple[float, int, int, Handler, Any]] = []
        self._num_inserted = 0

    def put(self, time: float, rank: int, handle: Handler, argument: Any) -> None:
        heapq.heappush(self._heap, (time, self._num_inserted, rank, handle, argument))
        self._num_inserted += 1

    def instant(self) -> list[int] | None:
        """Let the next instant happen; returns the ranks it touched, None at the end."""
        heap = self._heap
        if not heap:
            return None
        self.now = now = heap[0][0]
        touched: set[int] = set()
        while heap and heap[0][0] == now:
            _, _, rank, handle, argument = heapq.heappop(heap)
            if self._availability is not None:
                time = self._availability(rank, now)
                if time is None:
                    continue
                if time > now:
                    self.put(time, rank, handle, argument)
                    continue
            handle(rank, argument)
            touched.add(rank)
            self.num_happened += 1
        return sorted(touched)


class Envelope(NamedTuple):
    """A message from one rank to another."""

    sender: Rank
    receiver: Rank
    content: Content


class Cluster(ABC, Generic[NodeT]):
    """All ranks of a job, joined together; without a clock or a network."""

    #: Whether followers report the bytes that tasks hold although no limit counts bytes.
    reports_all_bytes = False

    def __init__(
        self,
        nodes: Sequence[NodeT],
        steps: Sequence[StepId] = (),
        *,
        members: int = 1,
        # Tasks enqueued and not complete, at most, a rank.
        depth: int = 1,
        # How the ranks of a group agree on an order; None: each runs the tasks that its own core decides.
        coordination: CoordinationName | None = None,
        # Whether a task begins when the last member of a group reaches it.
        coupled: bool = True,
        # Whether lanes take offered tasks, where `may_offer` allows that.
        takes_offers: bool = False,
        # How large each microbatch is, for hints that ask; None: unknown.
        sizes: tuple[float, ...] | None = None,
        # Whether replicas share the forwards of training steps. Then all ranks exchange reports between two steps, so
        # they are at most a step apart.
        shares: bool = False,
    ) -> None:
        self.nodes = tuple(nodes)
        self.steps = steps
        self.members = members
        self.groups = [
            RankGroup(self.nodes[first : first + members], coupled=coupled) for first in range(0, len(nodes), members)
        ]
        self._sizes = sizes
        self._sharers = RankGroup(self.nodes, coupled=False) if shares else None
        #: Where replicas share forwards, the rank that has begun a task of a microbatch on a virtual stage in a step.
        self._takers: dict[tuple[int, int, int], Rank] = {}
        self._ranks_per_stage = sum(node.rank.stage == 0 for node in nodes)
        for node in self.nodes:
            self._join_group(node, depth, coordination if members > 1 else None, takes_offers=takes_offers)

    def _join_group(
        self, node: NodeT, depth: int, coordination: CoordinationName | None, *, takes_offers: bool
    ) -> None:
        dispatch, send = partial(self.dispatch, node), partial(self._send_to_member, node)
        if coordination == "agreement":
            group = GroupMembership(node.rank.member, self.members)
            node.arbiter = node.agreement = AgreementArbiter(
                node.core, depth, dispatch, _ignore, group=group, send=send
            )
            return
        offers = None
        if takes_offers and self.members == 1 and may_offer(node.core, depth):
            node.slot = OfferedSlot()
            offers = Offers(node.core, node.slot, partial(self.enqueued, node))
        node.pauses = PauseTimer(node.core, self.now, partial(self.wake, node))
        node.arbiter = Arbiter(node.core, depth, dispatch, _ignore, offers, node.pauses)
        if coordination == "leader":
            reports_bytes = self.reports_all_bytes or node.core.limit.bytes is not None
            apply = partial(self.notify, node)
            node.leader_protocol = LeaderProtocol(node.core.group, send, apply, reports_bytes=reports_bytes)

    # For subclasses: a network and a clock.

    @abstractmethod
    def send(self, packet: Envelope) -> None:
        """Carry ``packet``; `deliver` takes it where it arrives."""

    @abstractmethod
    def begin(self, nodes: Sequence[NodeT]) -> None:
        """``nodes`` begin the first task on their lanes; `complete` ends it."""

    @abstractmethod
    def allow_step(self, nodes: Sequence[NodeT]) -> None:
        """``nodes``, which waited for their group, may open their next step."""

    @abstractmethod
    def now(self) -> float:
        """The time, in seconds."""

    @abstractmethod
    def wake(self, node: NodeT, seconds: float, pause: int) -> None:
        """Call `pause_over` for ``node`` after ``seconds``."""

    def pause_over(self, node: NodeT, pause: int) -> None:
        """``node`` has idled by choice as long as it may."""
        if node.pauses is not None and node.pauses.is_on(pause):
            node.pauses.end()
            node.arbiter.kick()

    def release(self, node: NodeT, released: ev.SendReleased) -> None:
        """Memory that is sent becomes free: at once."""
        self.notify(node, released)

    def preview(self, node: NodeT, task: Task) -> None:
        """The inputs of a forward are here: they show nothing."""

    def drop(self, node: NodeT, task: Task) -> None:
        """``node`` needs the output of ``task`` no longer."""

    def reduce(self, node: NodeT, virtual_stage: int) -> None:
        """``node`` sums gradients over replicas: there is nothing to sum."""
        self.notify(node, ev.ChunkReduced(virtual_stage))

    def finish_step(self, node: NodeT) -> None:
        node.checker.finish(node.step)
        node.num_finished += 1

    def bytes_held(self, node: NodeT, task: Task) -> int:
        return 0

    def output_bytes(self, node: NodeT, task: Task) -> int:
        return 0

    # What happens to a rank.

    def group_of(self, node: NodeT) -> RankGroup[NodeT]:
        return self.groups[node.rank // self.members]

    def opens_with(self, node: NodeT) -> RankGroup[NodeT]:
        return self._sharers or self.group_of(node)

    def open_step(self, node: NodeT) -> None:
        """``node`` opens its next step, after its group has opened the last one."""
        step = self.steps[node.num_opened]
        node.open_step(step)
        if node.agreement is not None:
            node.agreement.open_step(step)
        self.notify(node, self.opened_on(node, step))
        self.allow_step(self.opens_with(node).take_waiting())

    def opened_on(self, node: NodeT, step: StepId) -> ev.StepOpened:
        return self.opened(step)

    def opened(self, step: StepId) -> ev.StepOpened:
        """The event that opens ``step``, on all ranks alike."""
        sizes = None if self._sizes is None else self._sizes[: step.microbatches]
        return ev.StepOpened(step.number, step.mode, step.microbatches, sizes)

    def notify(self, node: NodeT, event: ev.Event) -> None:
        node.arbiter.kick()
        self.apply(node, event)

    def apply(self, node: NodeT, event: ev.Event) -> None:
        for instruction in node.core.apply(event):
            self.perform(node, instruction)

    def deliver(self, packet: Envelope) -> None:
        node, content = self.nodes[packet.receiver], packet.content
        if isinstance(content, GroupMessage):
            protocol = node.agreement or node.leader_protocol
            assert protocol is not None, f"{node.rank.name} runs alone, and gets {content}"
            protocol.on_message(packet.sender.member, content)
            return
        if isinstance(content, ev.BegunReported):
            if node.pauses is not None:
                node.pauses.begun_reported(content)
        elif isinstance(content, ev.Arrived):
            node.checker.arrive(content.step, content.task)
        elif isinstance(content, ev.Granted) and content.copy != node.rank.replica:
            node.checker.granted(content.step, content.task)
        elif isinstance(content, ev.Consumed) and content.step == node.step_or_none:
            node.checker.memory.consume(content.task, content.peer)
        self.notify(node, content)

    def dispatch(self, node: NodeT, task: Task) -> None:
        self._accept(node, task)
        self.enqueued(node, task)
        node.lane.append(task)
        if len(node.lane) == 1:
            self._reach(node)

    def enqueued(self, node: NodeT, task: Task) -> None:
        """The core hears of ``task``: now, or after the lane took an offer."""
        self.apply(node, ev.Enqueued(task))

    def take_offer(self, node: NodeT) -> None:
        """A task has returned: the lane begins an offered one before its core hears."""
        if node.slot is not None and (task := node.slot.pop()) is not None:
            self._accept(node, task)
            node.lane.append(task)

    def _accept(self, node: NodeT, task: Task) -> None:
        """``task`` must be one that may run now, on all followers too."""
        group = self.group_of(node)
        node.checker.enqueue(task)
        if self._sharers is not None and node.step.mode is Mode.TRAIN:
            taker = self._takers.setdefault((node.step.number, *task[1:]), node.rank)
            if taker != node.rank:
                node.checker.object_to(f"runs {task}, whose microbatch {taker.name} runs")
        if node.leader_protocol is not None and node.rank.member == 0:
            for follower in group.nodes[1:]:
                if lacks := follower.checker.lacks(task, node.step):
                    what = " ".join(map(str, lacks))
                    node.checker.object_to(f"ordered {task}, and {follower.rank.name} has not got {what}")
        other = group.enqueue(node, task)
        if other is not None:
            self.mismatch(node, task, other)

    def mismatch(self, node: NodeT, task: Task, other: Task) -> None:
        """``node`` runs ``task`` where another member of its group runs ``other``."""
        node.checker.object_to(f"runs {task} where others of its group run {other}")

    def complete(self, node: NodeT, seconds: float = 0.0) -> None:
        task = node.lane.popleft()
        num_bytes = self.bytes_held(node, task)
        node.checker.complete(task, num_bytes)
        completed = ev.Completed(task, num_bytes, seconds)
        node.arbiter.before_completion()
        if node.leader_protocol is not None and node.origin is None:
            node.leader_protocol.on_completed(completed, node.step)
        self.notify(node, completed)
        if node.lane and node.origin is None:
            self._reach(node)

    def _reach(self, node: NodeT) -> None:
        nodes = self.group_of(node).reach(node)
        if nodes:
            self.begin(nodes)

    # What a core asks for.

    def perform(self, node: NodeT, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Send(task, peer, consumed, copy):
                arrived = ev.Arrived(node.step, task, self.output_bytes(node, task), consumed)
                self.send(Envelope(node.rank, self._counterpart(node, peer, copy), arrived))
                self.release(node, ev.SendReleased(task, peer))
            case ev.ReportBegun(task, peer, seconds):
                begun = ev.BegunReported(node.step, task, seconds)
                self.send(Envelope(node.rank, self._counterpart(node, peer), begun))
            case ev.Credit(peer, task):
                consumed_here = ev.Consumed(node.step, node.rank.stage, task)
                self.send(Envelope(node.rank, self._counterpart(node, peer), consumed_here))
            case ev.Offer(task):
                self._tell(node, self._copies_of(task), ev.Offered(node.step, task, node.rank.replica))
            case ev.Claim(task, copy):
                node.checker.claim(task)
                holder = self._counterpart(node, self._holding_stage(task), copy)
                self._tell(node, (holder,), ev.Claimed(node.step, task, node.rank.replica))
            case ev.Grant(task, copy):
                if copy == node.rank.replica and task.virtual_stage == 0:  # its caller's: it asks itself
                    node.checker.claim(task)
                others = [rank for rank in self._copies_of(task) if rank != node.rank]
                hear = [rank for rank in others if rank.replica != copy]
                self._tell(node, hear, ev.Granted(node.step, task, copy))
            case ev.Give(task, copy):
                if not task.virtual_stage:
                    taker = self._counterpart(node, node.rank.stage, copy)
                    self._tell(node, (taker,), ev.Granted(node.step, task, copy))
            case ev.Preview(task):
                self.preview(node, task)
            case ev.Release(task):
                self.drop(node, task)
            case ev.ReduceChunk(virtual_stage):
                self.reduce(node, virtual_stage)
            case ev.ReportReady() | ev.Order() if node.leader_protocol is not None:
                node.leader_protocol.perform(instruction, node.step)
            case ev.FinishStep():
                self.finish_step(node)
            case _:
                raise AssertionError(f"{node.rank.name} gave {instruction}, which has no place here")

    def _counterpart(self, node: NodeT, stage: int, copy: int | None = None) -> Rank:
        """The rank of another stage that ``node`` exchanges tensors with; of replica ``copy``, or its own."""
        across = 0 if copy is None else (copy - node.rank.replica) * self.members
        return self.nodes[node.rank + (stage - node.rank.stage) * self._ranks_per_stage + across].rank

    def _copies_of(self, task: Task) -> list[Rank]:
        stage = self.nodes[0].core.graph.stage_of[task.virtual_stage]
        return [node.rank for node in self.nodes if node.rank.stage == stage]

    def _holding_stage(self, task: Task) -> int:
        return self.nodes[0].core.graph.stage_of[max(0, task.virtual_stage - 1)]

    def _tell(self, node: NodeT, ranks: Iterable[Rank], message: ClaimMessage) -> None:
        for rank in ranks:
            self.send(Envelope(node.rank, rank, message))

    def _send_to_member(self, node: NodeT, member: int, message: GroupMessage) -> None:
        self.send(Envelope(node.rank, self.nodes[node.rank - node.rank.member + member].rank, message))


class TimedCluster(Cluster[NodeT]):
    """A cluster in virtual time; a subclass says how long things take."""

    def __init__(self, queue: EventQueue, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.queue = queue

    def now(self) -> float:
        return self.queue.now

    def wake(self, node: NodeT, seconds: float, pause: int) -> None:
        self.queue.put(self.queue.now + seconds, node.rank, self._pause_over, pause)

    def _pause_over(self, rank: int, pause: int) -> None:
        self.pause_over(self.nodes[rank], pause)


def _ignore(cause: WaitCause) -> None:
    """Waits are not recorded: the timeline asks the core for the cause."""
