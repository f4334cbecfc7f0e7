"""Who waits for what, who owes it, and what happened before: the one answer, and the one wording, of every report.

Costs a walk over the tasks, or the events, of a step, so it is for reports only. `StageCore.wait_cause`, which the
shell may ask after every decision, is cheap and names no task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from rrfp.core import events as ev
from rrfp.core.claims import Sharing
from rrfp.core.event_history import StepEvents
from rrfp.core.stage_core import StageCore
from rrfp.core.step import Step
from rrfp.core.usage import WaitCause
from rrfp.errors import ConfigError
from rrfp.model.tasks import F, Kind, Task
from rrfp.model.topology import Topology

#: Tasks, and credits, that a report names for each rank: in a deep pipeline the others wait for these.
MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Waiting:
    """A task that was not enqueued."""

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
        *islice(_unclaimed(core), most),
    ]


def describe_task(core: StageCore, topology: Topology, entry: Waiting) -> str:
    """A task of `waiting`, and why it does not run; see `describe`."""
    return f"{core.graph.text_of(entry.task)} ({_reason(core, topology, entry)})"


def wait_line(name: str, texts: Iterable[str], separator: str = "; ") -> str:
    return f"{name} waits for: {separator.join(texts) or 'nothing'}"


def _not_enqueued(core: StageCore, step: Step) -> Iterator[Task]:
    yield from step.group.pending()
    if step.num_enqueued < step.num_tasks:
        tasks = core.graph.tasks(core.stage, step.id.microbatches, step.id.mode)
        unstarted = (task for task in tasks if not step.readiness.is_available(task))
        yield from sorted(unstarted, key=lambda task: (task.microbatch, task.kind is not F))


def _waiting_of(core: StageCore, step: Step, task: Task) -> Waiting | None:
    """Why ``task``, one of this stage, was not enqueued; None where it was."""
    ordered = frozenset(step.group.pending())
    is_waiting = task in ordered or not step.readiness.is_available(task)
    return _waiting(core, step, task, ordered) if is_waiting else None


def _waiting(core: StageCore, step: Step, task: Task, ordered: frozenset[Task]) -> Waiting:
    absent = step.readiness.absent_inputs(task)
    unreported = step.group.unreported(task)
    unmeasured: tuple[tuple[int, Task], ...] = ()
    cause = None
    if absent or (step.sharing is not None and not step.sharing.of(task.virtual_stage).is_own(task.microbatch)):
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
        case WaitCause.INPUT if core.step is not None and (sharing := core.step.sharing) is not None:
            return _shared_debt(core, topology, entry, sharing)
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


def _shared_debt(core: StageCore, topology: Topology, entry: Waiting, sharing: Sharing) -> str:
    """Who owes the inputs of a task where replicas share forwards."""
    kind, m, virtual_stage = entry.task
    claims, stage_of = sharing.of(virtual_stage), core.graph.stage_of
    if kind is F and virtual_stage in sharing.claims:
        stage, holder = stage_of[max(0, virtual_stage - 1)], claims.holders[m]
        if holder < 0:
            return f"offered by no copy of stage {stage}"
        what = "claimed from" if claims.is_asked(m) else "given by" if claims.is_own(m) else "not claimed from"
        return f"{what} {topology.name_of(topology.rank_of(stage, holder))}"
    if not claims.is_own(m):
        return "its forward runs here, or on another copy"
    owners = [(task, stage_of[task.virtual_stage]) for task in entry.absent]
    return ", ".join(
        f"{core.graph.text_of(task)} owed by {'this rank' if stage == core.stage else f'a copy of stage {stage}'}"
        for task, stage in owners
    )


def _unclaimed(core: StageCore) -> Iterator[str]:
    """Where replicas share forwards, those whose inputs lie here."""
    sharing = None if core.step is None or core.step.finished else core.step.sharing
    for task in () if sharing is None else sharing.unclaimed():
        yield f"a claim for {core.graph.text_of(task)} (by a copy of stage {core.graph.stage_of[task.virtual_stage]})"


def _owner(topology: Topology, stage: int) -> str:
    return topology.name_of(topology.rank_of(stage))


# The story of one task.


@dataclass(frozen=True, slots=True)
class Moment:
    """An event that concerns a task."""

    event: ev.Event
    #: Tasks that had begun on this rank in the step by then; None: it came before this rank opened the step.
    begun: int | None


@dataclass(frozen=True, slots=True)
class Story:
    """A task that runs on a core's stage, or whose output it reads, in the current or last step."""

    task: Task
    #: What happened to it and to its inputs here, oldest first; None where the core keeps no events of the step.
    moments: tuple[Moment, ...] | None
    #: Why it was not enqueued; None where it was, and for a task of another stage.
    waiting: Waiting | None


def story(core: StageCore, task: Task) -> Story:
    """What happened to ``task``, and what it waits for; a ConfigError if the stage neither runs nor reads it."""
    step = core.step
    if step is None:
        raise ConfigError(f"task is {task}, and stage {core.stage} has opened no step yet")
    is_own = step.states.knows(task)
    if not is_own and not step.states.reads(task):
        raise ConfigError(f"task is {task}, which stage {core.stage} neither runs nor reads in {step.id}")
    recorded = () if core.history is None else core.history.steps
    events = next((each for each in recorded if each.is_open and each.known.step == step.id.number), None)
    moments = None if events is None else tuple(_moments(step, events, task))
    return Story(task, moments, _waiting_of(core, step, task) if is_own else None)


def tell(core: StageCore, topology: Topology, task: Task) -> list[str]:
    """The `story` of ``task`` in words: a text for each moment, and last how it stands.

    ``topology`` is the rank's, for the names of others.
    """
    told = story(core, task)
    return [*_told(core, topology, told), _now(core, topology, told)]


def past_of(core: StageCore, topology: Topology, task: Task) -> str:
    """What happened to ``task`` so far, on one line; empty where that is nothing, or not known."""
    texts = _told(core, topology, story(core, task))
    return f"{core.graph.text_of(task)} so far: {', '.join(texts)}" if texts else ""


def _moments(step: Step, recorded: StepEvents, task: Task) -> Iterator[Moment]:
    inputs = frozenset(step.readiness.inputs(task)) if step.states.knows(task) else frozenset()
    yield from (Moment(event, None) for event in recorded.known.early if _concerns(event, step, task, inputs))
    begun = 0
    for event in recorded.events:
        if _concerns(event, step, task, inputs):
            yield Moment(event, begun)
        begun += type(event) is ev.Enqueued


def _concerns(event: ev.Event, step: Step, task: Task, inputs: frozenset[Task]) -> bool:
    about = getattr(event, "task", None)
    if about is None or (about != task and not (about in inputs and isinstance(event, _OF_INPUTS))):
        return False
    return getattr(event, "step", step.id) == step.id  # messages of the next step come in this one, too


#: The events of a task's inputs: they are here, or on their way.
_OF_INPUTS = ev.BegunReported | ev.Arrived | ev.Enqueued | ev.Ordered


def _told(core: StageCore, topology: Topology, told: Story) -> list[str]:
    texts = []
    for moment in told.moments or ():
        text = _event(core, topology, told.task, moment.event)
        begun = moment.begun
        when = "before the step" if begun is None else f"after {begun} task{'' if begun == 1 else 's'}"
        texts.append(f"{text} {when}")
    return texts


def _event(core: StageCore, topology: Topology, task: Task, event: Any) -> str:
    """``event`` in words; the task is named where it is an input of ``task``."""
    what = _what(topology, event)
    return what if event.task == task else f"{core.graph.text_of(event.task)} {what}"


def _what(topology: Topology, event: ev.Event) -> str:
    match event:
        case ev.Enqueued():
            return "began"
        case ev.Completed():
            return f"completed, holding {event.held} bytes," if event.held else "completed"
        case ev.SendReleased() | ev.Consumed():
            owner = topology.name_of(topology.rank_of(event.peer))
            return f"{'sent to' if isinstance(event, ev.SendReleased) else 'consumed by'} {owner}"
        case ev.ReadyReported() | ev.HeldReported():
            reporter = topology.name_of(topology.group[event.member])
            return f"reported {'ready' if isinstance(event, ev.ReadyReported) else 'complete'} by {reporter}"
        case ev.Ordered():
            return f"ordered as entry {event.sequence}"
        case ev.BegunReported():
            return "reported as begun"
    return type(event).__name__.lower()  # arrived, previewed


def _now(core: StageCore, topology: Topology, told: Story) -> str:
    step, task = core.step, told.task
    assert step is not None
    if told.waiting is not None:
        return _reason(core, topology, told.waiting)
    if not step.states.knows(task):
        owner = topology.name_of(topology.rank_of(core.graph.stage_of[task.virtual_stage]))
        return "here" if step.readiness.is_available(task) else f"owed by {owner}"
    if task in core.in_flight:
        place = core.in_flight.index(task)
        return "running" if not place else f"on the lane, after {core.graph.text_of(core.in_flight[place - 1])}"
    sending = step.states.of(task).sending
    to = [peer for peer in sorted(sending) if task.microbatch in sending[peer]]
    owing = [peer for output, peers in step.outputs.unconsumed() if output == task for peer in peers]
    name = {peer: topology.name_of(topology.rank_of(peer)) for peer in (*to, *owing)}
    debts = [*(f"being sent to {name[peer]}" for peer in to), *(f"credit owed by {name[peer]}" for peer in owing)]
    return ", ".join(debts) or "done"


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
