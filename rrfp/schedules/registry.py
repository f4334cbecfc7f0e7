"""Schedules by name: each a generator of patterns of (kind, chunk) slots without microbatches.

Each kind of each chunk runs the microbatches in order 0, 1, 2, ... A pattern may have more slots than there are
microbatches: surplus slots stay empty. So a pattern that is published for some M only (a multiple of N, or at least
2N - 1) also serves a smaller M: it is the schedule for the larger M without the tasks of its last microbatches. No task
reads another microbatch's output, so the remaining tasks cannot deadlock if the full schedule does not. No stage holds
more than in the full schedule, and run strictly no task starts later.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from rrfp.errors import ConfigError, misspelt
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Layout
from rrfp.model.schedule import Schedule
from rrfp.model.tasks import Kind, Mode, Task
from rrfp.schedules.csv import CsvSchedule
from rrfp.schedules.executed import ExecutedSchedule


@dataclass(frozen=True, slots=True)
class Needs:
    """The properties of a graph that a schedule requires."""

    #: C; None: any.
    chunks: int | None = None
    #: The placement of two and more chunks (with one chunk all placements are the same); None: any.
    layout: Layout | None = None
    #: Whether at least one virtual stage must have a split backward; not required by a schedule that places no
    #: weight tasks.
    split: bool = False

    def check(
        self,
        name: str,
        graph: TaskGraph,
        # How the caller gets a split backward, for errors.
        to_split: str = "split=True splits it",
    ) -> None:
        """Refuse a graph that the schedule ``name`` does not accept."""
        placement = graph.placement
        counts = {placement.chunks_of(stage) for stage in range(placement.stages)}
        if not graph.is_chain or len(counts) > 1:
            has = "branches" if not graph.is_chain else f"stages of {min(counts)} to {max(counts)} chunks"
            raise ConfigError(
                f"schedule {name} takes a chain with equally many chunks on each stage; the graph has {has}: choose "
                "another hint, or a schedule file made for it"
            )
        # (requirement, the graph's property, whether it fits)
        demands = []
        if self.chunks is not None:
            demands.append((_count(self.chunks), _count(placement.chunks), placement.chunks == self.chunks))
        if self.layout is not None:
            fits = placement.chunks == 1 or placement.layout == self.layout
            demands.append((f"{self.layout} placement", f"{placement.layout} placement", fits))
        if self.split:
            demands.append(("split backward", "unsplit backward", any(graph.split)))
        if not all(fits for _, _, fits in demands):
            takes = ", ".join(takes for takes, _, _ in demands)
            has = ", ".join(has for _, has, fits in demands if not fits)
            remedy = f" ({to_split})" if "unsplit backward" in has else ""
            raise ConfigError(f"schedule {name} takes {takes}; the graph has {has}{remedy}")


def _count(chunks: int) -> str:
    return f"{chunks} chunk{'' if chunks == 1 else 's'} a stage"


#: A kind of task and the local chunk that it runs on.
Slot = tuple[Kind, int]


def fill(slots: Iterable[Slot], graph: TaskGraph, stage: int, microbatches: int) -> tuple[Task, ...]:
    """The order of one stage; weight slots of unsplit backwards stay empty."""
    tasks = {
        (kind, chunk): iter([Task(kind, m, v) for m in range(microbatches)])
        for chunk, v in enumerate(graph.placement.virtual_stages(stage))
        for kind in graph.kinds(v, Mode.TRAIN)
    }
    no_tasks = iter(())
    filled = (next(tasks.get(slot, no_tasks), None) for slot in slots)
    return tuple(task for task in filled if task is not None)


def gpipe(graph: TaskGraph, microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards, both in microbatch order (Huang et al., 2019).

    Every stage holds all M microbatches. One chunk a stage.
    """
    stages = graph.placement.stages
    orders = tuple(
        tuple(Task(kind, m, stage) for kind in (Kind.F, Kind.B) for m in range(microbatches)) for stage in range(stages)
    )
    return Schedule("gpipe", orders)


def one_f_one_b(graph: TaskGraph, microbatches: int) -> Schedule:
    """1F1B: warm up with N - 1 - i forwards on stage i, then alternate (Narayanan et al., PipeDream-Flush, 2021).

    Stage i holds at most min(M, N - i) microbatches. One chunk a stage.
    """
    stages = graph.placement.stages
    return Schedule("1f1b", tuple(_one_f_one_b_order(stage, stages, microbatches) for stage in range(stages)))


def _one_f_one_b_order(stage: int, stages: int, microbatches: int) -> tuple[Task, ...]:
    warm_up = min(microbatches, stages - 1 - stage)
    order = [Task(Kind.F, m, stage) for m in range(warm_up)]
    for m in range(microbatches - warm_up):
        order += [Task(Kind.F, warm_up + m, stage), Task(Kind.B, m, stage)]
    order += [Task(Kind.B, m, stage) for m in range(microbatches - warm_up, microbatches)]
    return tuple(order)


def interleaved_1f1b(graph: TaskGraph, microbatches: int) -> Schedule:
    """Interleaved 1F1B: 1F1B over looped chunks, in groups of N microbatches (Narayanan et al., Megatron-LM, 2021).

    Forwards go group by group: N microbatches through chunk 0, the same N through chunk 1, and so on to the last chunk;
    backwards likewise, from the last chunk to the first. Stage i warms up with 2 (N - 1 - i) + (C - 1) N forwards, then
    alternates. With one chunk that would be twice 1F1B's warm-up without gain, so it then is 1F1B's own, N - 1 - i.

    Stage i holds at most 2 (N - 1 - i) + (C - 1) N + 1 chunk tasks; N - i with one chunk. Any M >= 1; the published
    schedule takes multiples of N. With equal stages and no latency the lanes idle (N - 1) (F + B) / C in all when M is
    a multiple of N, F and B being the times of a whole stage.
    """
    stages, chunks = graph.placement.stages, graph.placement.chunks
    groups = -(-microbatches // stages)
    forwards = [(Kind.F, chunk) for chunk in range(chunks) for _ in range(stages)] * groups
    backwards = [(Kind.B, chunk) for chunk in reversed(range(chunks)) for _ in range(stages)] * groups
    orders = []
    for stage in range(stages):
        after = stages - 1 - stage
        warm_up = after if chunks == 1 else min(2 * after + (chunks - 1) * stages, len(forwards))
        orders.append(fill(_alternating(forwards, backwards, warm_up), graph, stage, microbatches))
    return Schedule("interleaved-1f1b", tuple(orders))


def _alternating(forwards: list[Slot], backwards: list[Slot], warm_up: int) -> list[Slot]:
    """``warm_up`` forwards, then one of each in turn, then the rest."""
    steady = len(forwards) - warm_up
    pairs = zip(forwards[warm_up:], backwards[:steady], strict=True)
    return [*forwards[:warm_up], *(slot for pair in pairs for slot in pair), *backwards[steady:]]


def zb_h1(graph: TaskGraph, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with split backward, weight tasks deferred into the bubbles (Qi et al., Zero Bubble, 2023).

    F and B run in 1F1B's order; the weight task of microbatch m waits until B of m + i has run on stage i. So every
    stage holds at most min(M, N) microbatches, as many as 1F1B's first stage, and n_F - n_B is at most N - i; later
    stages have more weight tasks left for the end, when 1F1B idles. One chunk a stage, any M >= 1.

    Why not N - i on stage i, 1F1B's own memory? If a microbatch counts until its W, the last stage may hold one, and
    would run F, B, W of each before the next F: that is 1F1B. The paper, too, compares the peaks of the worst stage.

    With equal stages, no latency and M >= N the lanes idle (N - 1) max(F, B, F + B - W) in all: the paper's
    (N - 1) (F + B - W) where W is no longer than F and B, a third of 1F1B's bubble where all three are equal.
    """
    stages = graph.placement.stages
    room = max(microbatches, stages)
    orders = tuple(fill(_zb_h1_slots(stage, stages, room), graph, stage, microbatches) for stage in range(stages))
    return Schedule("zb-h1", orders)


def _zb_h1_slots(stage: int, stages: int, microbatches: int) -> list[Slot]:
    forward, backward, weight = (Kind.F, 0), (Kind.B, 0), (Kind.W, 0)
    after = stages - 1 - stage
    return [
        *[forward] * after,
        *[forward, backward] * stage,
        *[forward, backward, weight] * (microbatches - after - stage),
        *[backward, weight] * after,
        *[weight] * stage,
    ]


_F0, _B0, _W0 = (Kind.F, 0), (Kind.B, 0), (Kind.W, 0)
_F1, _B1, _W1 = (Kind.F, 1), (Kind.B, 1), (Kind.W, 1)


def zb_v(graph: TaskGraph, microbatches: int) -> Schedule:
    """ZB-V: two chunks a stage in V placement, split backward, nearly no bubble (Qi et al., Controllable Memory, 2024).

    The V returns the first microbatch to stage 0, which also has the last virtual stage, so backwards start there while
    forwards still run down the first arm. With F = B = W every stage then repeats six chunk tasks: F, B and W of both
    chunks.

    Every stage holds at most 2 N chunk tasks (1F1B's worst stage: N whole ones). Any M >= 1; the published schedule
    takes M >= 2N - 1. With F = B = W = 1 for each chunk task, no latency and M >= 2N - 1, the makespan is 6 M + N - 1:
    stage i starts at i and the last stage never idles, so no schedule of this placement is faster.
    """
    stages = graph.placement.stages
    room = max(microbatches, 2 * stages - 1)
    orders = tuple(fill(_zb_v_slots(stage, stages, room), graph, stage, microbatches) for stage in range(stages))
    return Schedule("zb-v", orders)


def _zb_v_slots(stage: int, stages: int, microbatches: int) -> list[Slot]:
    to_turn = stages - stage  # stages from here to the turn of the V, this one included
    return [
        # Until microbatch 0 returns from the turn, the first chunk fills the memory; then both chunks alternate.
        *[_F0] * (2 * to_turn - 1),
        *[_F1, _F0] * stage,
        # The second chunk's backwards have arrived down the second arm, the first chunk's not yet.
        *[_F1, _B1, _W1] * to_turn,
        # Steady: the first chunk is `to_turn - 1` + `stage` forwards ahead, so its F slots run out before the others.
        *[_F0, _B0, _W0, _F1, _B1, _W1] * (microbatches - stages),
        # Drain: tasks that other stages wait for come first.
        *[_B0, _B1] * stage,
        *[_B0, _W0] * to_turn,
        *[_W1] * stage,
        *[_W0] * stage,
    ]


#: Makes the order of every stage for a graph and M microbatches; may leave out weight tasks.
ScheduleGenerator = Callable[[TaskGraph, int], Schedule]

#: A schedule's name, the text of a schedule file, or a step that ran.
ScheduleSpec = str | CsvSchedule | ExecutedSchedule

_KNOWN: dict[str, tuple[ScheduleGenerator, Needs]] = {
    "gpipe": (gpipe, Needs(chunks=1)),
    "1f1b": (one_f_one_b, Needs(chunks=1)),
    "interleaved-1f1b": (interleaved_1f1b, Needs(layout="looped")),
    "zb-h1": (zb_h1, Needs(chunks=1, split=True)),
    "zb-v": (zb_v, Needs(chunks=2, layout="v", split=True)),
}


def schedule_names() -> tuple[str, ...]:
    return tuple(_KNOWN)


def schedule_generator(name: str) -> ScheduleGenerator:
    """The generator of the schedule ``name``; an unknown name is a ConfigError."""
    return _known(name)[0]


def schedule_needs(name: str) -> Needs:
    """What ``name`` requires of a graph; an unknown name is a ConfigError."""
    return _known(name)[1]


# Why so few? A schedule of a thousand stages takes a hundred megabytes.
@lru_cache(maxsize=16)
def make_schedule(spec: ScheduleSpec, graph: TaskGraph, microbatches: int) -> Schedule:
    """The schedule ``spec`` for ``graph``, complete and validated; a W that a named one omits runs right after its B.

    An unknown name, or a schedule that does not fit the graph, is a ConfigError.
    """
    if isinstance(spec, ExecutedSchedule):
        return spec.for_step(graph, microbatches)
    if isinstance(spec, CsvSchedule):
        return spec.for_graph(graph, microbatches)
    generate, needs = _known(spec)
    needs.check(spec, graph)
    return generate(graph, microbatches).with_local_tasks(graph).validate(graph, microbatches)


def _known(name: str) -> tuple[ScheduleGenerator, Needs]:
    if name not in _KNOWN:
        raise ConfigError(f"schedule is {misspelt(name, _KNOWN)}, must be one of: {', '.join(_KNOWN)}")
    return _KNOWN[name]
