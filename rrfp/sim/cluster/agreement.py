"""Coordination by agreement, the paper's way (section 3.2): every rank proposes its own pick, and all must agree.

A *round* is a scalar all-gather of one proposal a rank: what its own core and hint would run, or nothing. If all ranks
propose one task, all run it; else nobody runs anything. Precisely:

- A round begins only while the lanes of the group are free, no round is under way and some rank has a pick.
- It begins at the first instant at which some rank has news: after a task, and after a failed round once the ready set
  of some rank has grown, or its pick has changed, since the proposals of that round were taken. News that comes while a
  round is under way is answered by another round right after it.
- Proposals are what is true when the round begins. The round takes a fixed time, whatever it ends with, and for all of
  it the lanes are idle. So a failed round delays the next one by its own time at least, and if no news came meanwhile
  the group stands still until some arrives, even with a task ready on all ranks.
- A group of one holds no rounds.

With a hint that goes by the ready set, by what the group has run and by what neighbours report, the group always ends:
once everything that will come has arrived everywhere, these are equal on all ranks, so the picks are, and the arrival
that made them so has called a round. With any other hint (by the order of arrivals, by measured times) a group may
stand still for ever with a task ready on every rank; the run then ends with a `DeadlockError` that shows the picks.
"""

from __future__ import annotations

from functools import partial

from rrfp.arbiter.agreement import outcome_of
from rrfp.core import events as ev
from rrfp.core.tasks import Task
from rrfp.sim.cluster.engine import TensorParallelEngine
from rrfp.sim.cluster.rank_group import RankGroup
from rrfp.sim.cluster.result import GroupCounts


class _Ballot:
    """One group's agreement so far.

    Attributes:
        picks: what each rank would propose now, None for nothing.
        has_news: whether a ready set has grown or a pick has changed since the last round began.
        is_open: whether a round is under way.
        agreed: the task that the last round agreed on, until it is enqueued.
        num_rounds: rounds begun.
        num_failed: rounds that fail.
        num_disputed: failed rounds in which two ranks propose different tasks.
    """

    def __init__(self, num_ranks: int) -> None:
        self.picks: list[Task | None] = [None] * num_ranks
        self.has_news = False
        self.is_open = False
        self.agreed: Task | None = None
        self.num_rounds = self.num_failed = self.num_disputed = 0

    def cast(self) -> Task | None:
        """Take the proposals of a round; returns what they agree on."""
        self.has_news = False
        self.num_rounds += 1
        agreed = outcome_of(self.picks)
        if agreed is None:
            self.num_failed += 1
            self.num_disputed += len({*self.picks} - {None}) > 1
        return agreed


class AgreementCoordinator:
    """Implements `rrfp.sim.cluster.engine.Coordinator`.

    Args:
        engine: moves time.
        gather_seconds: how long a round takes.
    """

    def __init__(self, engine: TensorParallelEngine, *, gather_seconds: float) -> None:
        self._engine = engine
        self._gather = gather_seconds
        self._ballots = [_Ballot(len(group.cores)) for group in engine.groups]

    def follow(self, group: RankGroup, rank: int, instruction: ev.Instruction) -> None:
        """Cores outside a group report and order nothing."""

    def note_arrival(self, group: RankGroup, rank: int, producer: Task) -> None:
        """It is news if it made a task of ``rank`` ready."""
        readers = self._engine.graph.consumers(producer.kind, producer.virtual_stage, self._engine.step.mode)
        ready = group.cores[rank].ready
        if any(Task(kind, producer.microbatch, v) in ready for kind, v in readers):
            self._ballots[group.stage].has_news = True

    def decide(self, group: RankGroup) -> None:
        """Hold a round if one is due, and run what was agreed on."""
        ballot = self._ballots[group.stage]
        if group.running is None and not ballot.is_open and ballot.agreed is None:
            self._ask(group, ballot)
            if ballot.has_news and any(pick is not None for pick in ballot.picks):
                ballot.is_open = True
                seconds = self._gather if len(group.cores) > 1 else 0.0
                self._engine.after(seconds, partial(self._close, group, ballot, ballot.cast()))
        if ballot.agreed is not None:
            task, ballot.agreed = ballot.agreed, None
            for rank in range(len(group.cores)):
                self._engine.enqueue(group, rank, task)

    def counts(self, group: RankGroup) -> GroupCounts:
        """Every rank's word reaches every other rank, each round."""
        others = len(group.cores) - 1
        if not others:
            return GroupCounts()
        ballot = self._ballots[group.stage]
        words = ballot.num_rounds * len(group.cores) * others
        return GroupCounts(ballot.num_rounds, ballot.num_failed, ballot.num_disputed, words)

    def stalled(self, group: RankGroup) -> str | None:
        """The picks, where they differ."""
        ranks_by_pick: dict[Task | None, list[int]] = {}
        for rank, pick in enumerate(self._ballots[group.stage].picks):
            ranks_by_pick.setdefault(pick, []).append(rank)
        if len(ranks_by_pick) == 1:
            return None
        picks = "; ".join(
            f"{'nothing' if pick is None else pick} on rank {', '.join(map(str, ranks))}"
            for pick, ranks in ranks_by_pick.items()
        )
        return (
            f"all messages are here and the ranks of the group will never agree: hint "
            f"{type(group.cores[0].hint).__name__} picks {picks}; a hint that is not a pure function of the ready set "
            "needs the leader (coordination='leader')"
        )

    def _ask(self, group: RankGroup, ballot: _Ballot) -> None:
        """Ask the ranks whose core was told something what they would run."""
        for rank in sorted(group.told):
            choice = group.cores[rank].decide()
            pick = None if choice is None else choice.task
            if pick != ballot.picks[rank]:
                ballot.picks[rank] = pick
                ballot.has_news = True
        group.told.clear()

    def _close(self, group: RankGroup, ballot: _Ballot, agreed: Task | None) -> None:
        ballot.is_open = False
        ballot.agreed = agreed
        self._engine.touch(group)
