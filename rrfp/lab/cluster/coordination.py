"""How the ranks of a group agree on an order: by a `Leader`, or by `Agreement`; and how long their messages take.

What they say is up to `rrfp.arbiter.coordination`, as in a real job. A strict schedule is the same order on all ranks
already (`Independent`). `docs/simulator-tp.md` has the cost of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rrfp.plain import number, one_of, whole

#: The ways to agree that have messages, by name.
CoordinationName = Literal["leader", "agreement"]
COORDINATIONS: tuple[str, ...] = get_args(CoordinationName)

#: Seconds of a proposal and its outcome. The paper's Table 3 has 156 us of coordination a task at TP 2 and 234 us at TP
#: 4, failed rounds included: one or two of these.
GATHER_SECONDS = 120e-6
#: Seconds that a report or an order travels: one way.
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
    """Every rank proposes its pick before each task: see `rrfp.arbiter.coordination`."""

    #: How long proposals and their outcome travel, there and back through the group's first rank.
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
    return Leader() if one_of(COORDINATIONS, "coordination", spec) == "leader" else Agreement()


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """What the ranks of one group did to agree."""

    #: Decisions taken together: entries of the leader's log, or rounds of proposals.
    rounds: int = 0
    #: Those in which two ranks proposed different tasks, so that none ran.
    failed_rounds: int = 0
    #: From one rank to another rank of the group.
    messages: int = 0
