"""Who waits for what, and who owes it: the one answer, and the one wording, of every report on a stall.

Costs a walk over the tasks of a step, so it is for reports only. `StageCore.wait_cause`, which the shell may ask after
every decision, is cheap and names no task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from rrfp.core.stage_core import StageCore
from rrfp.core.step import Step
from rrfp.core.usage import WaitCause
from rrfp.model.tasks import F, Kind, Task
from rrfp.model.topology import Topology

#: Tasks, and credits, that a report names for each rank: in a deep pipeline the others wait for these.
MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Waiting:
    """A task that was not enqueued."""

    #: Which.
    task: Task
    #: Its absent inputs. In a forced order the microbatch before is one.
    absent: tuple[Task, ...] = ()
    #: On the leader of a group, followers that have not reported what the task needs from other stages.
    unreported: tuple[int, ...] = ()
    #: On the leader of a group, followers with forwards whose bytes they have not reported, and without which a limit
    #: on bytes lets no other forward start.
    unmeasured: tuple[tuple[int, Task], ...] = ()
    #: INPUT: inputs are absent. ORDER: the inputs are here, and the leader lacks a report, or the follower's log lacks
    #: the task. MEMORY: the limit blocks it. None: it is ready, or next but some in the leader's log.
    cause: WaitCause | None = None


def waiting(core: StageCore, most: int | None = MOST_NAMED) -> list[Waiting]:
    """The tasks of ``core``'s step that were not enqueued, ``most`` at most (None: all).

    The lowest microbatch comes first; on a follower, the tasks that were ordered come before the others.
    """
    step = core.step
    if step is None:
        return []
    ordered = frozenset(step.group.pending())
    return [_waiting(core, step, task, ordered) for task in islice(_not_enqueued(core, step), most)]


def unconsumed(core: StageCore, most: int | None = MOST_NAMED) -> list[tuple[Task, tuple[int, ...]]]:
    """Forward only: sent outputs, each with the stages whose `Consumed` is missing, lowest microbatch first."""
    owed = [] if core.step is None else core.step.outputs.unconsumed()
    return sorted(owed, key=lambda entry: entry[0].microbatch)[:most]


def describe(
    core: StageCore, topology: Topology, most: int = MOST_NAMED, dispute: tuple[Task, str] | None = None
) -> list[str]:
    """The waits of a rank, one text for each task and for each credit, ``most`` of either at most.

    ``topology`` is the rank's, for the names of those who owe something. ``dispute`` is a task whose turn the ranks of
    the group do not agree on, and how so; it comes first.
    """
    tasks = (entry for entry in waiting(core, most) if dispute is None or entry.task != dispute[0])
    return [
        *([] if dispute is None else [f"{core.graph.text_of(dispute[0])} ({dispute[1]})"]),
        *(describe_task(core, topology, entry) for entry in tasks),
        *(_describe_credit(core, topology, output, stages) for output, stages in unconsumed(core, most)),
    ]


def describe_task(core: StageCore, topology: Topology, entry: Waiting) -> str:
    """A task of `waiting`, and why it does not run; see `describe`."""
    return f"{core.graph.text_of(entry.task)} ({_reason(core, topology, entry)})"


def wait_line(name: str, texts: Iterable[str], separator: str = "; ") -> str:
    """What the rank ``name`` waits for, on one line."""
    return f"{name} waits for: {separator.join(texts) or 'nothing'}"


def _not_enqueued(core: StageCore, step: Step) -> Iterator[Task]:
    yield from step.group.pending()
    if step.num_enqueued < step.num_tasks:
        tasks = core.graph.tasks(core.stage, step.id.microbatches, step.id.mode)
        unstarted = (task for task in tasks if not step.readiness.is_available(task))
        yield from sorted(unstarted, key=lambda task: (task.microbatch, task.kind is not F))


def _waiting(core: StageCore, step: Step, task: Task, ordered: frozenset[Task]) -> Waiting:
    absent = step.readiness.absent_inputs(task)
    unreported = step.group.unreported(task)
    unmeasured: tuple[tuple[int, Task], ...] = ()
    cause = None
    if absent:
        cause = WaitCause.INPUT
    elif unreported or (core.group.follows and task not in ordered):
        cause = WaitCause.ORDER
    elif task not in step.ready:
        cause = WaitCause.MEMORY
        unmeasured = tuple(_unmeasured(core, step)) if task.kind is F and core.group.num_followers else ()
    return Waiting(task, absent, unreported, unmeasured, cause)


def _unmeasured(core: StageCore, step: Step) -> Iterator[tuple[int, Task]]:
    virtual_stages = core.graph.placement.virtual_stages(core.stage)
    for chunk, microbatch in sorted(step.admission.measured):
        forward = Task(F, microbatch, virtual_stages[chunk])
        yield from ((member, forward) for member in step.group.unmeasured(forward))


def _reason(core: StageCore, topology: Topology, entry: Waiting) -> str:
    match entry.cause:
        case WaitCause.INPUT:
            return ", ".join(_debt(core, topology, entry.task, producer) for producer in entry.absent)
        case WaitCause.ORDER if core.group.follows:
            return f"not ordered by {topology.name_of(topology.leader)}, which leads the group"
        case WaitCause.ORDER:
            late = (topology.name_of(topology.group[member]) for member in entry.unreported)
            return f"not reported by {' and '.join(late)}"
        case WaitCause.MEMORY:
            bytes_of = (
                f"{topology.name_of(topology.group[member])} has not reported the bytes of "
                f"{core.graph.text_of(forward)}"
                for member, forward in entry.unmeasured
            )
            return ", ".join(("blocked by the memory limit", *bytes_of))
    if core.group.follows:
        return "ordered, after others"
    return f"ready, but hint {type(core.hint).__name__} does not choose it"


def _describe_credit(core: StageCore, topology: Topology, output: Task, stages: Iterable[int]) -> str:
    owners = " and ".join(_owner(topology, stage) for stage in stages)
    return f"the credit for {core.graph.text_of(output)} (owed by {owners})"


def _debt(core: StageCore, topology: Topology, task: Task, producer: Task) -> str:
    if (producer.kind, producer.virtual_stage) == (task.kind, task.virtual_stage):
        return f"{core.graph.text_of(producer)} comes first: forced order"
    return f"{core.graph.text_of(producer)} owed by {_owner(topology, core.graph.stage_of[producer.virtual_stage])}"


def _owner(topology: Topology, stage: int) -> str:
    return topology.name_of(topology.rank_of(stage))


def state_of(core: StageCore) -> dict[str, Any]:
    """The state of ``core`` in its step as numbers and texts, to compare with that of another core."""
    step = core.step
    if step is None:
        return {"step": None}
    return {
        "step": [step.id.number, str(step.id.mode), step.id.microbatches],
        "finished": step.finished,
        "enqueued": {str(kind): [*step.enqueued[kind]] for kind in Kind},
        "in_flight": [*map(str, core.in_flight)],
        "ready": [*map(str, core.ready)],
        "waiting": [
            [str(each.task), [*map(str, each.absent)], [*each.unreported], each.cause and str(each.cause)]
            for each in waiting(core, None)
        ],
        "unconsumed": [[str(task), [*stages]] for task, stages in unconsumed(core, None)],
        "holding": asdict(core.holding),
        "peaks": asdict(core.peaks),
    }
