"""The ledger of held bytes: who holds how many, on each rank of a group.

A *holder* is a microbatch in work on a chunk, or an output that is still read or sent here. `own` sums what this rank
holds: what is reported. `worst` sums, for each holder, the most that any rank holds: what a limit counts on the leader
of a group, whose followers report their bytes. Outside groups the two are one.
"""

from __future__ import annotations

from rrfp.model.tasks import Task

#: A microbatch in work: local chunk and microbatch.
Owner = tuple[int, int]


class HeldBytes:
    """See the module's docstring. Of its ``members`` this one is number 0; the others are followers that report."""

    __slots__ = ("_by_holder", "_early", "_members", "own", "peak", "worst")

    def __init__(self, members: int = 1) -> None:
        self._members = members
        #: Bytes by rank. A holder has an entry while this rank holds something for it.
        self._by_holder: dict[Owner | Task, list[int]] = {}
        #: Outputs of followers that were faster than this rank. They count once it has its own.
        self._early: dict[Task, list[int]] = {}
        self.own = self.peak = self.worst = 0

    def of(self, holder: Owner | Task, member: int) -> int:
        entry = self._by_holder.get(holder)
        return 0 if entry is None else entry[member]

    def worst_of(self, holder: Owner | Task) -> int:
        """The most that ``holder`` holds on any rank."""
        return max(self._by_holder.get(holder, (0,)))

    def hold(self, owner: Owner, num_bytes: int, member: int = 0) -> None:
        entry = self._by_holder.get(owner)
        if entry is None:
            if not num_bytes:
                return
            entry = self._by_holder[owner] = [0] * self._members
        self._set(entry, num_bytes, member)

    def keep_output(self, task: Task, num_bytes: int) -> None:
        """The output of ``task`` takes ``num_bytes`` on this rank, until `drop`."""
        entry = self._by_holder[task] = self._early.pop(task, [0] * self._members)
        self.worst += max(entry)
        self._set(entry, num_bytes, 0)

    def keep_output_elsewhere(self, task: Task, num_bytes: int, member: int) -> None:
        """The output of ``task`` takes ``num_bytes`` on a follower; it counts while this rank keeps its own.

        Followers do not report when they let go of an output, so the leader's own end stands for theirs.
        """
        entry = self._by_holder.get(task)
        if entry is None:
            self._early.setdefault(task, [0] * self._members)[member] = num_bytes
        else:
            self._set(entry, num_bytes, member)

    def drop(self, holder: Owner | Task) -> None:
        entry = self._by_holder.pop(holder, None)
        if entry is not None:
            self.own -= entry[0]
            self.worst -= max(entry)

    def _set(self, entry: list[int], num_bytes: int, member: int) -> None:
        if member == 0:
            self.own += num_bytes - entry[0]
            if self.own > self.peak:
                self.peak = self.own
        before = max(entry)
        entry[member] = num_bytes
        self.worst += max(entry) - before
