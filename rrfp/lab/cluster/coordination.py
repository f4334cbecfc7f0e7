"""How the ranks of a group agree on an order: `Leader`, this package's way, and `Agreement`, the paper's.

A strict schedule is the same order on all ranks already (`Independent`). `docs/simulator-tp.md` has the cost of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rrfp.arbiter.agreement import outcome_of
from rrfp.errors import ConfigError
from rrfp.lab.cluster.event_queue import EventQueue
from rrfp.lab.cluster.node import Node
from rrfp.model.tasks import Task
from rrfp.plain import number, whole

#: The ways to agree that have messages, by name.
CoordinationName = Literal["leader", "agreement"]
COORDINATIONS: tuple[str, ...] = get_args(CoordinationName)

#: Seconds of a scalar all-gather. The paper's Table 3 gives 156 us of coordination a task at TP 2 and 234 us at TP 4;
#: at the 1.4 and 2.0 rounds a task that the simulation counts there, a round takes about this.
GATHER_SECONDS = 120e-6
#: Seconds that a report or an order travels: one way, where an all-gather is there and back.
CONTROL_SECONDS = GATHER_SECONDS / 2


@dataclass(frozen=True, slots=True)
class Leader:
    """Rank 0 decides over what is ready everywhere; every rank runs its log."""

    #: Tasks that a rank has enqueued and not completed, at most. 1: the leader decides when a task ends, with all that
    #: is known then, and the order travels while lanes are idle. 2: it decides one task ahead: the order travels behind
    #: compute, and the decision knows less.
    depth: int = 1
    #: How long a report or an order travels.
    control_seconds: float = CONTROL_SECONDS

    def __post_init__(self) -> None:
        whole("depth", self.depth, 1)
        number("control_seconds", self.control_seconds, 0)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Every rank proposes its pick before each task: see `AllGather`."""

    gather_seconds: float = GATHER_SECONDS

    def __post_init__(self) -> None:
        number("gather_seconds", self.gather_seconds, 0)


@dataclass(frozen=True, slots=True)
class Independent:
    """Every rank follows its own core: for strict schedules, equal on all ranks."""


Coordination = Leader | Agreement | Independent


def resolve_coordination(spec: Coordination | str | None) -> Coordination:
    """A way to agree by its name, or as it is; None: a leader."""
    if spec is None:
        return Leader()
    if not isinstance(spec, str):
        return spec
    if spec not in COORDINATIONS:
        raise ConfigError(f"coordination is {spec!r}, must be one of: {', '.join(COORDINATIONS)}")
    return Leader() if spec == "leader" else Agreement()


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """What the ranks of one group did to agree."""

    #: Decisions taken together: entries of the leader's log, or all-gathers.
    rounds: int = 0
    #: Those after which no task ran.
    failed_rounds: int = 0
    #: Failed ones in which two ranks proposed different tasks; in the others some ranks had nothing.
    disputed_rounds: int = 0
    #: Words from one rank to another rank of the group, however a collective routes them.
    messages: int = 0


class AllGather:
    """Coordination by agreement, the paper's way (section 3.2): every rank proposes its own pick, and all must agree.

    A *round* is a scalar all-gather of one proposal a rank: what its own core and hint would run, or nothing. If all
    ranks propose one task, all run it; else no rank runs anything. Precisely:

    - A round begins only while the lanes of the group are free, no round is under way and some rank has a pick.
    - It begins at the first instant at which some rank has news: after a task, and after a failed round once the ready
      set of some rank has grown, or its pick has changed, since the proposals of that round were taken. News that comes
      while a round is under way is answered by another round right after it.
    - Proposals are what is true when the round begins. The round takes ``seconds``, whatever it ends with, and for all
      of it the lanes are idle. So a failed round delays the next one by its own time at least, and if no news came
      meanwhile the group stands still until some arrives, even with a task ready on all ranks.
    - A group of one holds no rounds.

    With a hint that goes by the ready set, by what the group has run and by what neighbours report, the group always
    ends: once everything that will come has arrived everywhere, these are equal on all ranks, so the picks are, and the
    arrival that made them so has called a round. With any other hint (by the order of arrivals, by measured times) a
    group may stand still forever with a task ready on every rank; the run then ends with a `DeadlockError` that shows
    the picks.
    """

    def __init__(
        self, nodes: Sequence[Node], seconds: float, queue: EventQueue, dispatch: Callable[[Node, Task], None]
    ) -> None:
        self._nodes = nodes
        self._seconds = seconds if len(nodes) > 1 else 0.0
        self._queue = queue
        self._dispatch = dispatch
        #: What each rank would propose now, None for nothing.
        self._picks: list[Task | None] = [None] * len(nodes)
        #: Whether a ready set has grown or a pick has changed since the last round began.
        self._has_news = False
        self._is_open = False
        #: The task that the last round agreed on, until it is enqueued.
        self._agreed: Task | None = None
        self._num_rounds = self._num_failed = self._num_disputed = 0

    def note_arrival(self, node: Node, producer: Task) -> None:
        """The output of ``producer`` is news if it made a task ready."""
        readers = node.core.graph.consumers(producer.kind, producer.virtual_stage, node.step.mode)
        if any(Task(kind, producer.microbatch, v) in node.core.ready for kind, v in readers):
            self._has_news = True

    def decide(self) -> None:
        """Hold a round if one is due, and run what it agreed on."""
        if not self._nodes[0].lane and not self._is_open and self._agreed is None:
            self._ask()
            if self._has_news and any(pick is not None for pick in self._picks):
                self._begin_round()
        if self._agreed is not None:
            task, self._agreed = self._agreed, None
            for node in self._nodes:
                self._dispatch(node, task)

    def counts(self) -> GroupCounts:
        """Every rank's proposal reaches every other rank, each round."""
        members = len(self._nodes)
        if members == 1:
            return GroupCounts()
        messages = self._num_rounds * members * (members - 1)
        return GroupCounts(self._num_rounds, self._num_failed, self._num_disputed, messages)

    def stalled(self) -> str | None:
        """Why the group will never run the task that all have ready."""
        ranks_by_pick: dict[Task | None, list[int]] = {}
        for rank, pick in enumerate(self._picks):
            ranks_by_pick.setdefault(pick, []).append(rank)
        if len(ranks_by_pick) == 1:
            return None
        picks = "; ".join(
            f"{'nothing' if pick is None else pick} on rank {', '.join(map(str, ranks))}"
            for pick, ranks in ranks_by_pick.items()
        )
        return (
            f"all messages are here and the ranks of the group will never agree: hint "
            f"{type(self._nodes[0].core.hint).__name__} picks {picks}; a hint that is not a pure function of the ready "
            "set needs the leader (coordination='leader')"
        )

    def _ask(self) -> None:
        """Ask the ranks to which something happened what they would run."""
        for rank, node in enumerate(self._nodes):
            if not node.arbiter.is_due:
                continue
            node.arbiter.is_due = False
            choice = node.core.decide()
            pick = None if choice is None else choice.task
            if pick != self._picks[rank]:
                self._picks[rank] = pick
                self._has_news = True

    def _begin_round(self) -> None:
        """All ranks propose; the outcome is known after the round's time."""
        self._has_news = False
        self._is_open = True
        self._num_rounds += 1
        agreed = outcome_of(self._picks)
        if agreed is None:
            self._num_failed += 1
            self._num_disputed += len({*self._picks} - {None}) > 1
        queue, leader = self._queue, self._nodes[0].rank
        if self._seconds:
            queue.put(queue.now + self._seconds, leader, self._end_round, agreed)
        else:
            self._end_round(leader, agreed)

    def _end_round(self, rank: int, agreed: Task | None) -> None:
        self._is_open = False
        self._agreed = agreed
