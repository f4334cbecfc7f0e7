"""Seeded fault simulation: any number of small random pipelines of real cores, each with faults, each judged.

One seed makes one run: `run_seed`. Every run must end as `rrfp.lab.faults.checker.REQUIRED` says: with every task run
once on the right inputs, or with one error that names its cause. It never hangs and never computes a wrong value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from rrfp.arbiter.coordination import GroupMessageKind
from rrfp.core.stage_core import StageCore
from rrfp.errors import Origin
from rrfp.hints.registry import HintSpec
from rrfp.lab.cluster.ranks import name_of_rank, stage_of_rank
from rrfp.lab.faults.checker import REQUIRED, Ending
from rrfp.lab.faults.cluster import CoreFactory, FaultCluster
from rrfp.lab.faults.deadlock_report import DeadlockReport
from rrfp.lab.faults.faults import AnyId, ClaimMessageId, Death, GroupMessageId, MessageFault, name_of
from rrfp.lab.faults.random_scenario import make_scenario
from rrfp.lab.faults.scenario import Scenario


@dataclass(frozen=True)
class FaultRun:
    """One run, and what the checkers say of it."""

    scenario: Scenario
    ending: Ending
    #: The error that it ended with, or empty.
    text: str
    #: What is wrong with that; none: the run is as it must be.
    problems: tuple[str, ...]


def run_seed(
    seed: int,
    hint: HintSpec | None = None,
    *,
    make_core: CoreFactory = StageCore,
    trace: Callable[[str], None] | None = None,
) -> FaultRun:
    """Make the run of a seed, run it, and judge it."""
    return run_scenario(make_scenario(seed, hint), make_core=make_core, trace=trace)


def replay_command(seed: int) -> str:
    return f"rrfp check faults --seed {seed}"


def run_scenario(
    scenario: Scenario, *, make_core: CoreFactory = StageCore, trace: Callable[[str], None] | None = None
) -> FaultRun:
    """Run a scenario and judge it; see `run_seed`."""
    cluster = FaultCluster(scenario, make_core, trace)
    ending, text = cluster.run()
    return FaultRun(scenario, ending, text, tuple(_problems(scenario, cluster, ending, text)))


def _problems(scenario: Scenario, cluster: FaultCluster, ending: Ending, text: str) -> Iterator[str]:
    yield from cluster.violations
    if scenario.shared is not None and len(scenario.faults) > 1:
        # Who runs what depends on what went wrong before, and so does which messages there are.
        applied = [f for f in scenario.faults if not isinstance(f, MessageFault) or f in cluster.network.applied]
        scenario = replace(scenario, faults=tuple(applied))
    if ending not in allowed_endings(scenario) and ending is not Ending.UNFIT:
        faults = ", ".join(map(name_of, scenario.faults)) or "no fault"
        yield f"with {faults} it must not end {ending}: {text}"
    if ending is Ending.FINISHED:
        yield from _of_a_finish(scenario, cluster)
    elif ending is Ending.STALLED:
        yield from _of_a_stall(cluster, text)
    elif ending in (Ending.REFUSED, Ending.ABORTED):
        yield from _of_an_abort(scenario, cluster, ending, text)


def allowed_endings(scenario: Scenario) -> frozenset[Ending]:
    """How a run with all these faults may end."""
    # By any of them; well only if each of them may end well.
    dead = {fault.rank for fault in scenario.faults if isinstance(fault, Death)}
    each = []
    for fault in scenario.faults:
        endings = REQUIRED[name_of(fault)]
        if isinstance(fault, MessageFault) and dead & {fault.message.sender, fault.message.receiver}:
            endings |= {Ending.FINISHED}  # a copy from, or to, a dead rank may never arrive
        if name_of(fault) in ("delay copy bytes", "delay copy claim") and len(scenario.faults) > 1:
            endings |= {Ending.REFUSED}  # another fault may hold its rank in the step after which the copy comes
        each.append(endings)
    failures = frozenset[Ending]().union(*each) - {Ending.FINISHED}
    return failures | {Ending.FINISHED} if all(Ending.FINISHED in endings for endings in each) else failures


def _of_a_finish(scenario: Scenario, cluster: FaultCluster) -> Iterator[str]:
    for fault in scenario.faults:
        if isinstance(fault, MessageFault) and fault not in cluster.network.applied:
            yield f"it finished, and {fault.message} was never sent"
    for message in cluster.network.lost:
        if not _is_missed_by_nobody(message):
            yield f"it finished without {message}"


def _is_missed_by_nobody(message: AnyId) -> bool:
    # Most of what a follower holds only makes its leader count better. A forward may be claimed by another copy, too.
    if isinstance(message, ClaimMessageId):
        return message.sort == "claim"
    return isinstance(message, GroupMessageId) and message.kind is GroupMessageKind.HELD


def _of_a_stall(cluster: FaultCluster, text: str) -> Iterator[str]:
    report, lost = DeadlockReport(cluster.nodes), set(cluster.network.lost)
    named = set(report.lost)
    if not lost:
        yield f"it stalled, and no message was lost: {text}"
    yield from (f"the stall report calls {message} lost, which was not" for message in named - lost)
    if lost and not named and all(map(_is_missed_by_nobody, lost)):
        yield f"it stalled, though nothing waits for the messages that were lost: {text}"
    for message in lost - named:
        receiver = cluster.nodes[message.receiver]
        if receiver.agreement is not None and isinstance(message, GroupMessageId):
            is_named = (receiver.rank.stage, receiver.rank.replica) in report.disputed
        else:
            is_named = _is_missed_by_nobody(message) or message.step != receiver.step.number
        if not is_named:
            yield f"the stall report does not name {message}, which was lost: {text}"


def _of_an_abort(scenario: Scenario, cluster: FaultCluster, ending: Ending, text: str) -> Iterator[str]:
    dead = [fault.rank for fault in scenario.faults if isinstance(fault, Death)]
    first = cluster.failures.first
    if ending is Ending.ABORTED and (first is None or not _is_origin(dead[0], first[1])):
        yield f"{name_of_rank(dead[0])} died, and the pipeline was {text}"
    for node in cluster.nodes:
        if node.origin is None and node.rank not in dead:
            yield f"{node.rank.name} was never notified that the pipeline ended"
        if node.origin is not None and first is not None and len(scenario.faults) == 1 and node.origin != first[1]:
            yield f"{node.rank.name} was {Ending.ABORTED} by {node.origin}, and the pipeline {text}"


def _is_origin(rank: int, origin: Origin) -> bool:
    return origin.stage == stage_of_rank(rank) and origin.rank in (None, int(rank))


@dataclass
class Campaign:
    """Many runs."""

    runs: int = 0
    #: By kind of fault, how runs with that fault alone ended; "none" and "several" for the others.
    endings: dict[str, Counter[Ending]] = field(default_factory=dict)
    #: Runs with problems: seed, and the first of its problems.
    failed: list[tuple[int, str]] = field(default_factory=list)

    def add(self, run: FaultRun) -> None:
        faults = run.scenario.faults
        kind = {0: "none", 1: name_of(faults[0]) if faults else ""}.get(len(faults), "several")
        self.runs += 1
        self.endings.setdefault(kind, Counter())[run.ending] += 1
        if run.problems:
            self.failed.append((run.scenario.seed, run.problems[0]))


def run_campaign(seeds: Iterable[int], hint: HintSpec | None = None, *, make_core: CoreFactory = StageCore) -> Campaign:
    campaign = Campaign()
    for seed in seeds:
        campaign.add(run_seed(seed, hint, make_core=make_core))
    return campaign
