"""One workload for groups of T ranks, and each way in which a group agrees on an order, on the same draws."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rrfp.core.hint import Hint
from rrfp.costs.table import CostTable
from rrfp.engine.engine import run
from rrfp.hints.registry import create_hint, create_strict
from rrfp.lab.cluster.coordination import Agreement, Coordination, Leader
from rrfp.lab.cluster.simulation import TensorParallelResult, run_tensor_parallel
from rrfp.lab.generators.latency import RankLatencies, rank_latencies
from rrfp.lab.generators.profiles import make_costs
from rrfp.memory.admission import Limit

PROFILE, STAGES, LATENCY = "mllm", 8, "spike"
HINTS = ("bf", "bfw")

#: The leader with default times is the measure of all; "free" is a leader, or agreement, that takes no time.
LEADER, AHEAD, AGREEMENT, FREE_AGREEMENT = "leader", "leader, depth 2", "agreement", "agreement, free"
WAYS: dict[str, Coordination] = {
    LEADER: Leader(),
    AHEAD: Leader(depth=2),
    AGREEMENT: Agreement(),
    FREE_AGREEMENT: Agreement(gather_seconds=0),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One draw of the workload, for one hint and one number of ranks."""

    hint: str
    tp: int
    seed: int
    microbatches: int


@dataclass(frozen=True, slots=True)
class Way:
    """One way to agree on an order, on one draw.

    Attributes:
        makespan: seconds of the step.
        share: part of the step that the mean stage lost to coordination.
        rounds: decisions a task.
        failed: of them, with different tasks proposed, so that none ran.
        messages: messages between ranks of a group, per task.
        run_s: wall time of the simulation.
    """

    makespan: float
    share: float
    rounds: float
    failed: float
    messages: float
    run_s: float

    @classmethod
    def of(cls, result: TensorParallelResult, run_s: float) -> Way:
        """What a run came to."""
        rounds, failed = result.rounds_per_task, result.failed_rounds_per_task
        return cls(result.makespan, result.coordination_share, rounds, failed, result.messages_per_task, run_s)


@dataclass(frozen=True, slots=True)
class Compared:
    """All ways on one draw.

    Attributes:
        case: the draw.
        ways: by name.
        free: makespan of a leader that takes no time.
        strict: makespan of strict 1F1B, which needs no coordination.
    """

    case: Case
    ways: dict[str, Way]
    free: float
    strict: float


def compare(case: Case) -> Compared:
    """Run every way on one draw."""
    costs, ranks = draw(case)
    ways = {name: one_way(case, costs, ranks, way) for name, way in WAYS.items()}
    # A leader without delay, or a strict schedule, is a single rank with the slowest messages, to the last bit.
    slowest = ranks.slowest(costs)
    hints = [create_hint(case.hint) for _ in range(STAGES)]
    free = run(slowest, hints, limits()).makespan
    schedule = [create_strict("1f1b") for _ in range(STAGES)]
    strict = run(slowest.to_unsplit(), schedule, [Limit()] * STAGES).makespan
    return Compared(case, ways, free, strict)


def slower_control(slowed: tuple[Case, float]) -> dict[str, float]:
    """Makespans of a case where a message takes so many seconds, and a round of agreement twice as long."""
    case, seconds = slowed
    costs, ranks = draw(case)
    ways: dict[str, Coordination] = {
        LEADER: Leader(1, seconds),
        AHEAD: Leader(2, seconds),
        AGREEMENT: Agreement(2 * seconds),
    }
    return {name: one_way(case, costs, ranks, way).makespan for name, way in ways.items()}


def draw(case: Case) -> tuple[CostTable, RankLatencies]:
    """The costs of the case, and what the messages of each rank take; rank 0's are the same for every TP."""
    split = case.hint == "bfw"
    costs = make_costs(PROFILE, STAGES, case.microbatches, split=split, seed=case.seed, latency=LATENCY)
    return costs, rank_latencies(costs, LATENCY, case.tp, seed=case.seed)


def limits() -> list[Limit]:
    """2N on every stage."""
    return [Limit.resolve("2n", stage, STAGES) for stage in range(STAGES)]


def one_way(case: Case, costs: CostTable, ranks: RankLatencies, way: Coordination) -> Way:
    """Run one way on one draw."""
    make: Callable[[], Hint] = partial(create_hint, case.hint)
    began = time.perf_counter()
    result = run_tensor_parallel(costs, ranks, make, limits(), way)
    return Way.of(result, time.perf_counter() - began)
