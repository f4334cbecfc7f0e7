"""How many ranks the stages of a run with faults have, and how those of one stage work together."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rrfp.core.order_log import Group
from rrfp.runtime.core_driver import Coordination
from rrfp.sim.cluster.ranks import Rank, ranks_of

#: Hints whose choice is a function of the ready set and of what ran: the only ones that must come to an agreement.
AGREEABLE = ("bf", "fb", "b-priority", "f-priority", "bfw")


@dataclass(frozen=True, slots=True)
class Crew:
    """How many ranks a stage has, and how they work together.

    Attributes:
        replicas: copies of the pipeline.
        members: ranks of a group.
        coordination: how a group agrees on an order: a leader's log, or proposals until all agree.
        coupled: a task ends on no member before all have begun it, as with collectives inside.
        bytes_held: by member, what a microbatch holds on a chunk from its forward to its last task.
        is_numbered: outputs carry their index in their channel; if not, cores find repetitions by the task alone.
        jitter: outputs reach the members of a group up to so many seconds apart.
    """

    replicas: int = 1
    members: int = 1
    coordination: Coordination = "leader"
    coupled: bool = True
    bytes_held: tuple[int, ...] = (0,)
    is_numbered: bool = True
    jitter: float = 0.0

    def lag(self, step: int, microbatch: int, virtual_stage: int, member: int) -> float:
        """How much later than it must an output reaches a member, in seconds."""
        return self.jitter * (hash((step, microbatch, virtual_stage, member)) % 997) / 997 if self.jitter else 0.0

    @property
    def is_led(self) -> bool:
        """Whether there are followers."""
        return self.members > 1 and self.coordination == "leader"

    @property
    def agrees(self) -> bool:
        """Whether there are proposals."""
        return self.members > 1 and self.coordination == "agreement"

    def group(self, rank: Rank) -> Group:
        """The group that ``rank`` is in."""
        return Group(rank.member, self.members)

    def ranks(self, stages: int) -> tuple[Rank, ...]:
        """All ranks, by number."""
        return ranks_of(stages, self.replicas, self.members)

    def describe(self) -> list[str]:
        """What differs from one rank a stage, in words."""
        parts = []
        if self.replicas > 1:
            parts.append(f"{self.replicas} replicas")
        if self.members > 1:
            pace = "which meet in each task" if self.coupled else "each at its own pace"
            parts.append(f"groups of {self.members} under {_HOW[self.coordination]}, {pace}")
        if any(self.bytes_held):
            parts.append(f"a microbatch holds {' and '.join(map(str, self.bytes_held))} bytes a chunk")
        if not self.is_numbered:
            parts.append("outputs are not numbered")
        return parts


#: One rank a stage.
ALONE = Crew()

_HOW: dict[Coordination, str] = {"leader": "a leader", "agreement": "agreement"}


def draw_crew(rng: random.Random, stages: int, microbatches: int, *, may_agree: bool) -> Crew:
    """Mostly one rank a stage; groups and replicas where the pipeline is small, so that runs stay short.

    Args:
        rng: decides everything.
        stages: N.
        microbatches: the largest M.
        may_agree: the hint is one that comes to an agreement.
    """
    is_small = stages <= 3 and stages * microbatches <= 12
    members = rng.choice([1, 1, 1, 1, 1, 2, 2, 3]) if is_small else 1
    replicas = rng.choice([1, 1, 1, 1, 1, 1, 2]) if is_small and members < 3 else 1
    agrees = may_agree and rng.random() < 0.4
    sizes = tuple([rng.choice([1, 1, 2, 5, 9]) for _ in range(members)])
    return Crew(
        replicas=replicas,
        members=members,
        coordination="agreement" if agrees else "leader",
        coupled=rng.random() < 0.7,
        bytes_held=sizes if rng.random() < 0.4 and not agrees else (0,) * members,
        is_numbered=rng.random() < 0.7,
        jitter=rng.choice([0.0, 1.0, 5.0]) if members > 1 else 0.0,
    )
