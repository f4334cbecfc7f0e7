"""PipeMorph's published trace of slow links, played in proportion: simulated, and between real processes.

The trace (``experiments/large-scale/superpod/large-scale.trace`` of its repository) is of a model of 140 billion
parameters on 8 stages with 24 microbatches: at an iteration the named links get the named delay, or none. Where nothing
was slow its 1F1B took 1440 ms, so F + B + W of a microbatch took 1440 / 31 ms. Delays are scaled to ours by that. One
step may stand for several iterations: what is slow then changes after fewer steps, and a limit that follows is more
often behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.links.simulated import METHODS, MICROBATCHES, MILLISECONDS, STAGES, table
from benchmarks.shared.steps import Step
from rrfp.engine.engine import run
from rrfp.hints.registry import DEFAULT_HINT, create_hint
from rrfp.lab.simulation import measures_of, resolve_limits, simulate
from rrfp.memory.admission import Limit
from rrfp.memory.round_trips import FollowedLimits

#: First iteration, first one after, links, milliseconds each way.
EVENTS: tuple[tuple[int, int, tuple[int, ...], int], ...] = (
    (15, 85, (2,), 30),
    (120, 190, (0, 5), 40),
    (230, 300, (6,), 20),
    (340, 410, (2, 3, 6), 50),
    (450, 520, (5,), 60),
    (560, 630, (1, 6), 60),
    (670, 740, (0, 4), 20),
    (780, 850, (0, 1, 2), 40),
    (890, 960, (4, 5), 50),
)
#: Of the trace.
ITERATIONS = 1030

#: Our time over PipeMorph's, for the same part of a step.
SCALE = sum(MILLISECONDS.values()) / (1440 / (STAGES - 1 + MICROBATCHES))

#: Samples a second in PipeMorph's own logs, over these iterations, and over its whole logs, at the end of which the
#: network cards fail.
PUBLISHED = {"1F1B": (20.64, 21.12), "ZB": (19.54, 20.43), "PipeMorph": (29.54, 28.84)}
#: What it gained over 1F1B.
LEAST_GAIN = 1.37


def slow_in(step: int, iterations: int) -> tuple[tuple[int, ...], float]:
    """The slow links in a step (from 1) of so many ``iterations``, and their milliseconds each way, in ours."""
    iteration = iterations * step - iterations // 2
    for begin, end, links, milliseconds in EVENTS:
        if begin <= iteration < end:
            return links, SCALE * milliseconds
    return (), 0.0


@dataclass(frozen=True, slots=True)
class Play:
    """The whole trace by one method."""

    method: str
    #: Milliseconds of a step, the mean over the trace.
    milliseconds: float
    #: Microbatches held, the sum over stages, in the step with the most.
    held: float
    #: Steps in which other processes took the processor; 0 in simulation.
    disturbed: int = 0


@dataclass(frozen=True, slots=True)
class Aim:
    """What was to be shown."""

    name: str
    value: float
    sense: str
    limit: float

    @property
    def is_met(self) -> bool:
        """Whether it was."""
        return self.value <= self.limit if self.sense == "at most" else self.value >= self.limit


def aims_of(plays: Iterable[Play], base: str, ours: str) -> list[Aim]:
    """How much faster the method ``ours`` is than ``base``, where both were played."""
    found = {play.method: play.milliseconds for play in plays}
    if base not in found or ours not in found:
        return []
    return [Aim(f"the trace: {base} over {ours}", found[base] / found[ours], "at least", LEAST_GAIN)]


#: What `simulated` plays.
PLAYED = ("1F1B, blocking", "1F1B", "whole, n", "whole, 2n", "whole, auto", "split, n", "split, 2n", "split, auto")


def simulated(methods: Sequence[str] = PLAYED, iterations: int = 1) -> Iterator[Play]:
    """The trace by each of ``methods``, a step for so many ``iterations``; limits follow as between steps of a job."""
    steps = ITERATIONS // iterations
    for method in methods:
        split, options = METHODS[method]
        limits = FollowedLimits(table((), 0.0, split=split).to_graph()) if options.get("limit") == "auto" else None
        known = dict[tuple[object, ...], tuple[float, int]]()
        seconds, held = 0.0, 0
        for step in range(1, steps + 1):
            links, milliseconds = slow_in(step, iterations)
            costs = table(links, milliseconds, split=split)
            key = (links, milliseconds, limits and limits.now)
            if key not in known:
                if "strict" in options:
                    result = simulate(costs, **options).result  # type: ignore[arg-type]
                else:
                    counts = resolve_limits(costs, options["limit"]) if limits is None else map(Limit, limits.now)
                    own = list(counts)
                    result = run(costs, [create_hint(DEFAULT_HINT) for _ in own], own)
                known[key] = result.makespan, sum(peaks.held for peaks in result.peaks)
            seconds, held = seconds + known[key][0], max(held, known[key][1])
            if limits is not None:
                limits.observe(measures_of(costs))
        yield Play(method, 1e3 * seconds / steps, held)


def measured(steps: Iterable[Step], pace: float) -> Iterator[Play]:
    """What the processes did, of which these are the ``steps``."""
    by_method = dict[str, list[Step]]()
    for step in steps:
        if step.turn.number > 0:
            by_method.setdefault(step.turn.method, []).append(step)
    for method, own in by_method.items():
        milliseconds = 1e3 / pace * sum(step.seconds for step in own) / len(own)
        held = max(sum(step.held) for step in own)
        yield Play(method, milliseconds, held, sum(step.is_disturbed for step in own))
