"""The numbered log of one group: the leader appends, every rank runs exactly what it says.

Collectives inside tasks then happen in one order on all ranks of the group, whatever each of them saw first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp.core.tasks import Task
from rrfp.errors import ConfigError, ProtocolError


@dataclass(frozen=True, slots=True)
class Group:
    """This rank's part in its group of ranks that run the same tasks in the same order.

    Attributes:
        member: this rank's index in the group; 0 leads.
        size: ranks in the group; 1 means that nothing has to be agreed on.

    Raises:
        ConfigError: if ``member`` is outside ``0..size-1``.
    """

    member: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.member < self.size:
            raise ConfigError(f"group: member is {self.member}, must be 0..{self.size - 1}")

    @property
    def num_followers(self) -> int:
        """Ranks that report to this one: none unless it leads."""
        return self.size - 1 if self.member == 0 else 0

    @property
    def follows(self) -> bool:
        """Whether this rank takes its order from the leader."""
        return self.member > 0


class OrderLog:
    """The log as one rank has it in one step."""

    def __init__(self) -> None:
        self._entries: list[Task] = []
        self._known: set[Task] = set()
        self._next = 0

    def append(self, task: Task) -> int:
        """Leader: the next entry is ``task``, which it enqueues; returns its sequence number."""
        self._entries.append(task)
        self._next = len(self._entries)
        return self._next - 1

    def receive(self, sequence: int, task: Task) -> None:
        """Follower: entry ``sequence`` is ``task``. A gap, a repeated entry or a repeated task is a ProtocolError."""
        expected = len(self._entries)
        if sequence != expected:
            what = "repeats an entry" if sequence < expected else "leaves a gap"
            raise ProtocolError(f"order log {what}: got entry {sequence} ({task}), expected {expected}")
        if task in self._known:
            raise ProtocolError(f"order log repeats a task: entry {sequence} is {task}, which it has already")
        self._known.add(task)
        self._entries.append(task)

    def head(self) -> Task | None:
        """Follower: the next entry to run, or None."""
        return self._entries[self._next] if self._next < len(self._entries) else None

    def pending(self) -> Sequence[Task]:
        """Follower: the entries that were not enqueued, in order."""
        return self._entries[self._next :]

    def advance(self, task: Task) -> None:
        """Follower: ``task`` was enqueued, which must be the head of the log."""
        if task != self.head():
            raise ProtocolError(f"{task} was enqueued, but the leader's log says {self.head()}")
        self._next += 1
