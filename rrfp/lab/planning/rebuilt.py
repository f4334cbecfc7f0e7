"""Recorded steps, and steps as they would be with the layers elsewhere.

A recorded time is of all layers of a virtual stage. Each gets the part that its measured time has of theirs, so a layer
keeps how the microbatches of its stage differ, and how they follow one another. Beside that tasks have jitter (what
they do not have in common, `rrfp.lab.advice.causes`), wait to be dispatched, and send messages: these are drawn from
what the same stage, and the same link, has recorded. A message between stages that had none is drawn from all. Jitter
is a factor, and drawn from tasks of about the same length: a stall of so many seconds is a larger part of a short one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Self

import numpy as np

from rrfp.costs.table import MATRICES, Bits, CostTable, Matrix
from rrfp.errors import ConfigError
from rrfp.lab.advice.causes import factors_of, split_backward
from rrfp.lab.advice.recorded import RecordedStep, with_durations
from rrfp.lab.advice.replays import joined
from rrfp.lab.planning.layers import Layers, ModelLayout
from rrfp.model.placement import Placement
from rrfp.model.tasks import B, F, Kind, Task, W

#: Steps that are rebuilt for the judgement of a layout, for each recorded one.
DRAWS = 2

#: Jitter is drawn from this part of a row's tasks, the nearest in length.
NEAR_IN_LENGTH = 1 / 8

#: A stage that recomputes holds less than this, beside one that does not.
NO_LESS = 0.95

#: A stage whose recorded time is off from its layers' by more than this, beside the others, is named.
UNLIKE = 0.1


@dataclass(frozen=True, slots=True)
class StepShape:
    """What of a step is not as it was recorded; None: as it was."""

    layout: ModelLayout | None
    #: Of backward; of a trace that is not split, with which part of it as weight gradients.
    split: bool | None
    weight_part: float | None
    microbatches: int
    recompute: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Recomputed:
    """What backward takes, and a forward leaves, of each virtual stage that recomputes: factors on what they do now."""

    backward: Matrix
    held: Matrix
    #: Whether it held less, a microbatch and beside its forward; the others recompute in both traces or in neither.
    is_measured: Bits

    @classmethod
    def between(cls, steps: Sequence[RecordedStep], recomputing: Sequence[RecordedStep]) -> Self:
        """From steps of a job and of the same job that recomputes; over their forwards, as their data may differ."""
        (now, backward, held), (then, longer, less) = map(_means, (steps, recomputing))
        if now.shape != then.shape:
            raise ConfigError(
                f"recomputed: the trace has {len(then)} virtual stages, must have {len(now)}, as the one beside it"
            )
        left = _over(less * now, held * then)
        found = cls(_over(longer * now, backward * then), left, (left < NO_LESS) & (less < NO_LESS * held))
        if not found.is_measured.any():
            raise ConfigError(
                "recomputed: no stage holds less than in the trace beside it, must be of a job that recomputes"
            )
        return found


def _means(steps: Sequence[RecordedStep]) -> tuple[Matrix, Matrix, Matrix]:
    """Of a microbatch, by virtual stage: seconds of forward and of backward (of inputs where split), and bytes."""
    tables = [step.costs for step in steps]
    if any(table.held is None for table in tables):
        raise ConfigError("recomputed: a trace has no bytes, must have those of each microbatch")
    columns = [[getattr(table, name) for table in tables] for name in ("forward", "backward", "held")]
    forward, backward, held = (np.concatenate(rows, axis=1).mean(axis=1) for rows in columns)
    return forward, backward, held


def _over(one: Matrix, other: Matrix) -> Matrix:
    return np.divide(one, other, out=np.ones_like(one), where=other > 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Jitter:
    """Of the tasks of one kind on a recorded virtual stage, by how long they are."""

    #: Over their mean, rising.
    lengths: Matrix
    factors: Matrix

    @classmethod
    def of(cls, lengths: Matrix, factors: Matrix) -> Self:
        """Scaled so that tasks with drawn factors take as long together as these."""
        rising = np.argsort(lengths, kind="stable")
        found = cls(lengths[rising], factors[rising])
        sums = np.concatenate([[0.0], np.cumsum(found.factors)])
        start = np.clip(np.arange(len(rising)) - found._count // 2, 0, len(rising) - found._count)
        expected = found.lengths @ (sums[start + found._count] - sums[start]) / found._count
        return replace(found, factors=found.factors * (found.lengths @ found.factors / expected if expected else 1.0))

    @property
    def _count(self) -> int:
        """How many of the nearest are drawn from."""
        return max(1, round(NEAR_IN_LENGTH * len(self.lengths)))

    def drawn(self, lengths: Matrix, draw: np.random.Generator) -> Matrix:
        """For each length the factor of one of the nearest."""
        first, last = (np.searchsorted(self.lengths, lengths, side) for side in ("left", "right"))
        start = np.clip(draw.integers(first, last + 1) - self._count // 2, 0, len(self.lengths) - self._count)
        factors: Matrix = self.factors[start + draw.integers(self._count, size=len(lengths))]
        return factors


class RebuiltSteps:
    """Makes steps by number: of the recorded layout as they were, or of any as they would be."""

    def __init__(
        self,
        steps: Sequence[RecordedStep],
        layers: Layers | None,
        slow: Sequence[int] = (),
        recomputed: Recomputed | None = None,
    ) -> None:
        self._recorded = steps
        #: What stages that recompute would take; None where it is not known.
        self.recomputed = recomputed
        #: Of the first step; all have its shape.
        self.costs = costs = steps[0].costs
        self.layers = layers
        if layers is not None:
            _check_layout(costs, layers)
            self._parts = parts = layers.layout.pieces(layers.count)
            self._home = np.array([v for v, part in enumerate(parts) for _ in part])
            self._work = {F: layers.forward, B: layers.backward, W: layers.backward}
            ratios = self._ratios()
            #: How much longer each stage takes for the same layer.
            self.slow = tuple(float(ratios[s]) if s in slow else 1.0 for s in range(costs.stages))
            #: By stage, how its time compares with its layers', beside the middle stage.
            self.ratios = ratios / np.array(self.slow)
            self._draw_from()
        #: The steps on which candidates are compared, and those on which the best are judged.
        count = len(self._recorded)
        self.searched = range(count)
        self.judged = range(count) if layers is None else range(count, count + DRAWS * count)
        self._known: dict[tuple[int, ModelLayout | None, int, tuple[int, ...]], RecordedStep] = {}

    @property
    def where(self) -> Placement:
        """Which stage held which virtual stage."""
        costs = self.costs
        return Placement(costs.stages, costs.chunks, "v" if costs.placement == "v" else "looped")

    def step(self, shape: StepShape, number: int) -> RecordedStep:
        key = (number, shape.layout, shape.microbatches, shape.recompute)
        if (step := self._known.get(key)) is None:
            if shape.layout is None:
                step = self._recomputing(resized(self._recorded, number, shape.microbatches), shape.recompute)
            else:
                smooth = resized(self._smooth, number, shape.microbatches)
                step = self._rebuilt(smooth, shape.layout, number, shape.recompute)
            self._known[key] = step
        if shape.split is None or shape.split == step.costs.split:
            return step
        if shape.split:
            assert shape.weight_part is not None
            return split_backward([step], shape.weight_part)[0]
        return _merged(step)

    def in_part(self, number: int) -> Mapping[str, RecordedStep]:
        """A step as it was recorded but for one part, which is as in the rebuilt one; by the name of the part."""
        layers, own = self.layers, self._recorded[number % len(self._recorded)]
        assert layers is not None
        anew = self.step(StepShape(layers.layout, None, None, own.costs.microbatches), number)
        messages: Any = {name: getattr(anew.costs, name) for name in ("latency_forward", "latency_backward")}
        return {
            "the jitter of tasks": replace(own, costs=with_durations(own.costs, anew.costs.durations)),
            "the times of messages": replace(own, costs=replace(own.costs, **messages)),
            "the waits for dispatch": replace(own, dispatch=anew.dispatch, order=anew.order),
        }

    def seconds(self) -> Matrix:
        """Of each piece in the mean recorded step, on a stage that is not slow."""
        assert self.layers is not None
        total = np.zeros(len(self.layers.names))
        for step in self._recorded:
            for kind, rows in step.costs.durations.items():
                total += rows.sum(axis=1)[self._home] * self._shares(kind) / self._slow_of_piece()
        return total / len(self._recorded)

    def spread(self) -> Matrix:
        """The standard deviation of each piece's seconds over microbatches, times their number."""
        assert self.layers is not None
        rows = np.concatenate([sum(step.costs.durations.values(), start=np.zeros(())) for step in self._recorded], 1)
        shares = (self._shares(F) + 2 * self._shares(B)) / 3
        spread: Matrix = rows.std(axis=1)[self._home] * shares * self.costs.microbatches / self._slow_of_piece()
        return spread

    def may_recompute(self, layout: ModelLayout | None) -> tuple[int, ...]:
        """The stages all of whose layers have been measured to recompute."""
        if (found := self.recomputed) is None:
            return ()
        if layout is None or self.layers is None:
            where, pieces = self.where, [[v] for v in range(self.costs.num_virtual_stages)]
        else:
            where, pieces = layout.where, [self._home[part].tolist() for part in layout.pieces(self.layers.count)]
        measured = [bool(found.is_measured[own].all()) for own in pieces]
        return tuple(s for s in range(where.stages) if all(measured[v] for v in where.virtual_stages(s)))

    def _ratios(self) -> Matrix:
        assert self.layers is not None
        measured = np.zeros(self.costs.stages)
        for v, part in enumerate(self._parts):
            both = self.layers.forward[part] + self.layers.backward[part]
            measured[self.costs.stage_of(v)] += both.sum()
        if not measured.all():
            raise ConfigError("layers: a stage's layers take no time, must take some: measure them on a larger sample")
        work = np.mean([step.costs.work() for step in self._recorded], axis=0)
        ratios: Matrix = work / measured
        return ratios / np.median(ratios)

    def _slow_of_piece(self) -> Matrix:
        return np.array([self.slow[self.costs.stage_of(v)] for v in self._home])

    def _shares(self, kind: Kind, weights: Matrix | None = None) -> Matrix:
        """The part that each piece has of its virtual stage."""
        own = self._work[kind] if weights is None else weights
        sums = np.array([own[part].sum() for part in self._parts])[self._home]
        even = 1 / np.array([len(part) for part in self._parts])[self._home]
        return np.where(sums > 0, own / np.where(sums > 0, sums, 1.0), even)

    # Other layouts.

    def _draw_from(self) -> None:
        factors, costs = factors_of(self._recorded), self.costs
        kinds = [*costs.durations]
        self._gaps: dict[tuple[Kind, int], Matrix] = {}
        for kind in kinds:
            rows = np.concatenate([step.dispatch[kind] + step.order[kind] for step in self._recorded], axis=1)
            for stage in range(costs.stages):
                self._gaps[kind, stage] = rows[list(costs.virtual_stages_of(stage))].ravel()
        messages: dict[tuple[int, int], list[Matrix]] = {}
        for step in self._recorded:
            for e, (u, v) in enumerate(costs.edges()):
                a, b = costs.stage_of(u), costs.stage_of(v)
                if a != b:
                    messages.setdefault((a, b), []).append(step.costs.latency_forward[e])
                    messages.setdefault((b, a), []).append(step.costs.latency_backward[e])
        self._messages = {link: np.concatenate(rows) for link, rows in messages.items()}
        self._all_messages = np.concatenate([*self._messages.values()]) if messages else np.zeros(1)
        self._smooth: list[RecordedStep] = []
        for step, own in zip(self._recorded, factors.jitter, strict=True):
            parts = dict(zip(kinds, np.split(own, len(kinds)), strict=True))
            smooth = {kind: rows / parts[kind] for kind, rows in step.costs.durations.items()}
            self._smooth.append(replace(step, costs=with_durations(step.costs, smooth)))
        jitter = np.split(np.concatenate(factors.jitter, axis=1), len(kinds))
        self._jitter: dict[tuple[Kind, int], _Jitter] = {}
        self._mean: dict[Kind, Matrix] = {}
        for kind, drawn in zip(kinds, jitter, strict=True):
            rows = np.concatenate([step.costs.durations[kind] for step in self._smooth], axis=1)
            self._mean[kind] = rows.mean(axis=1)
            for v, seconds in enumerate(rows):
                self._jitter[kind, v] = _Jitter.of(_over_mean(seconds, self._mean[kind][v]), drawn[v])

    def _recomputing(self, step: RecordedStep, stages: Sequence[int]) -> RecordedStep:
        found, costs = self.recomputed, step.costs
        if found is None or not stages:
            return step
        here = np.array([costs.stage_of(v) in stages for v in range(costs.num_virtual_stages)])
        backward, held = (np.where(here, factors, 1.0)[:, np.newaxis] for factors in (found.backward, found.held))
        assert costs.held is not None
        return replace(step, costs=replace(costs, backward=costs.backward * backward, held=costs.held * held))

    def _rebuilt(
        self, step: RecordedStep, layout: ModelLayout, number: int, recompute: Sequence[int] = ()
    ) -> RecordedStep:
        """A step without jitter, on another layout and with jitter anew."""
        layers, where = self.layers, layout.where
        assert layers is not None
        parts, microbatches = layout.pieces(layers.count), step.costs.microbatches
        fields: dict[str, Any] = {"latency_forward": [], "latency_backward": [], "held": None, "weight": None}
        changed = [v for v in range(len(parts)) if where.stage_of(v) in recompute]
        dispatch: dict[Kind, Matrix] = {}
        for index, (kind, smooth) in enumerate(step.costs.durations.items()):
            take = self._weights(parts, self._shares(kind))
            take /= np.array([self.slow[self.costs.stage_of(v)] for v in range(take.shape[1])])
            if kind is B and self.recomputed is not None:
                take[changed] *= self.recomputed.backward
            rows, gaps = take @ smooth, np.empty((len(parts), microbatches))
            lengths = _over_mean(rows, (take @ self._mean[kind])[:, np.newaxis])
            for v in range(len(parts)):
                stage, draw = where.stage_of(v), np.random.default_rng([number, index, v])
                home = int(np.argmax(take[v] * self._jitter_weight(kind)))
                rows[v] *= self.slow[stage] * self._jitter[kind, home].drawn(lengths[v], draw)
                gaps[v] = draw.choice(self._gaps[kind, stage], microbatches)
            fields[_NAMES[kind]], dispatch[kind] = rows, gaps
        for v in range(len(parts) - 1):
            a, b, draw = where.stage_of(v), where.stage_of(v + 1), np.random.default_rng([number, 9, v])
            for name, link in (("latency_forward", (a, b)), ("latency_backward", (b, a))):
                fields[name].append(self._drawn_messages(link, draw, microbatches))
        shape = (len(parts) - 1, microbatches)
        for name in ("latency_forward", "latency_backward"):
            fields[name] = np.array(fields[name]).reshape(shape)
        if step.costs.held is not None:
            take = self._weights(parts, self._shares(F, layers.num_bytes))
            if self.recomputed is not None:
                take[changed] *= self.recomputed.held
            fields["held"] = take @ step.costs.held
        costs = CostTable(where.stages, where.chunks, where.layout, microbatches, sizes=step.costs.sizes, **fields)
        order = {kind: np.zeros_like(rows) for kind, rows in dispatch.items()}
        late = {self.costs.stage_of(task.virtual_stage): seconds for task, seconds in step.opening.items()}
        opening = {Task(F, 0, where.virtual_stages(stage)[0]): seconds for stage, seconds in late.items()}
        return RecordedStep(costs, dispatch, order, opening, step.closing, step.seconds)

    def _weights(self, parts: Sequence[range], shares: Matrix) -> Matrix:
        """What each new virtual stage takes of each recorded one."""
        weights = np.zeros((len(parts), self.costs.num_virtual_stages))
        for v, part in enumerate(parts):
            np.add.at(weights[v], self._home[part], shares[part])
        return weights

    def _jitter_weight(self, kind: Kind) -> Matrix:
        mean: Matrix = np.mean([step.costs.durations[kind].mean(axis=1) for step in self._recorded], axis=0)
        return mean

    def _drawn_messages(self, link: tuple[int, int], draw: np.random.Generator, microbatches: int) -> Matrix:
        if link[0] == link[1]:
            return np.zeros(microbatches)
        known = self._messages.get(link, self._messages.get(link[::-1], self._all_messages))
        drawn: Matrix = draw.choice(known, microbatches)
        return drawn


def _over_mean(seconds: Matrix, mean: Matrix) -> Matrix:
    return _over(seconds, np.broadcast_to(mean, seconds.shape))


_NAMES: Mapping[Kind, str] = {F: "forward", B: "backward", W: "weight"}


def resized(steps: Sequence[RecordedStep], number: int, microbatches: int) -> RecordedStep:
    """The step of a number, and as much of those behind it as has so many microbatches together."""
    own = steps[0].costs.microbatches
    step = reduce(joined, [steps[(number + n) % len(steps)] for n in range(-(-microbatches // own))])
    if step.costs.microbatches == microbatches:
        return step
    fields: dict[str, Any] = {"microbatches": microbatches}
    for name in MATRICES.values():
        rows = getattr(step.costs, name)
        fields[name] = None if rows is None else rows[:, :microbatches]
    if step.costs.sizes is not None:
        fields["sizes"] = step.costs.sizes[:microbatches]
    dispatch, order = ({k: rows[:, :microbatches] for k, rows in each.items()} for each in (step.dispatch, step.order))
    opening = {task: late for task, late in step.opening.items() if task.microbatch < microbatches}
    return replace(step, costs=replace(step.costs, **fields), dispatch=dispatch, order=order, opening=opening)


def _merged(step: RecordedStep) -> RecordedStep:
    """Backward as one task, dispatched once."""
    dispatch, order = ({kind: rows[kind] for kind in (F, B)} for rows in (step.dispatch, step.order))
    return replace(step, costs=step.costs.to_unsplit(), dispatch=dispatch, order=order)


def _check_layout(costs: CostTable, layers: Layers) -> None:
    own = layers.layout.where
    is_placed = own.chunks == 1 or costs.placement == own.layout
    if not is_placed or (costs.stages, costs.chunks) != (own.stages, own.chunks):
        recorded = f"{costs.stages} stages of {costs.chunks} chunk(s), {costs.placement}"
        split = f"{own.stages} of {own.chunks}, {own.layout}"
        raise ConfigError(f"layers: the trace has {recorded}, the file {split}: must be of the split that was recorded")
