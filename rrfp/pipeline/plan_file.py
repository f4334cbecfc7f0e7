"""A plan that `rrfp plan` wrote: how a model is cut, placed and scheduled, read and checked against a pipeline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from rrfp.errors import ConfigError
from rrfp.hints.registry import create_hint
from rrfp.memory.admission import Limit
from rrfp.model.placement import Placement
from rrfp.plain import MakeError, Reader, fields_of, flag, one_of, or_none, path_of, read_json, shown, text, whole
from rrfp.trace.job_data import plain_limit, read_limit

if TYPE_CHECKING:  # rrfp plan reads and writes plans without torch
    from rrfp.pipeline.options import OptionArguments

#: What callers pass as ``plan``: a file of `rrfp plan`, or what is in it.
PlanSpec = str | os.PathLike[str] | Mapping[str, Any]

#: The field of the file that a pipeline reads; others are for people.
PLAN = "plan"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a plan decides."""

    stages: int
    chunks: int
    placement: Literal["looped", "v"]
    #: A name, or ``file.py:attribute``.
    hint: str
    limit: Limit | int | str | None
    split: bool
    #: The first layer of each virtual stage but the first, and how many layers the model has; None: as it is cut.
    cuts: tuple[int, ...] | None = None
    layers: int | None = None
    #: Stages whose modules should recompute their forward in backward; a pipeline cannot see whether they do.
    recompute: tuple[int, ...] = ()

    @classmethod
    def read(cls, spec: PlanSpec) -> Self:
        """The plan in a file, or in what was in one; a ConfigError names the file and the field."""
        if isinstance(spec, Mapping):
            document: Any = spec
            name = PLAN
        else:
            path = path_of("plan", spec)
            name = f"plan: {path}"
            document = read_json(path, name)
        plain = document.get(PLAN) if isinstance(document, Mapping) else None
        if not isinstance(plain, Mapping):
            raise ConfigError(f"{name}: has no object {PLAN!r}, must be a file that rrfp plan wrote")
        error = partial(_error, name)
        plan = cls(**fields_of(plain, _READERS, error=error))
        plan._check(error)
        return plan

    def _check(self, error: MakeError) -> None:
        try:
            create_hint(self.hint)
            Limit.resolve(self.limit, 0, self.stages)
        except ConfigError as fault:
            raise error("", str(fault)) from None
        if any(stage >= self.stages for stage in self.recompute):
            raise error("recompute", f"is {list(self.recompute)}, must be stages in 0..{self.stages - 1}")
        if (self.cuts is None) != (self.layers is None):
            raise error("cuts", "and layers must both be given, or None")
        if self.cuts is not None and self.layers is not None:
            count, bounds = self.stages * self.chunks, (0, *self.cuts, self.layers)
            if len(bounds) != count + 1 or any(start >= stop for start, stop in pairwise(bounds)):
                reason = f"is {list(self.cuts)}, must be {count - 1} ascending numbers in 1..{self.layers - 1}"
                raise error("cuts", reason)

    def to_plain(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in _READERS}
        cuts = None if self.cuts is None else list(self.cuts)
        return {**plain, "limit": plain_limit(self.limit), "cuts": cuts, "recompute": list(self.recompute)}

    @property
    def where(self) -> Placement:
        return Placement(self.stages, self.chunks, self.placement)

    def options(self, passed: OptionArguments, stages: int) -> OptionArguments:
        """The options of a pipeline of ``stages`` stages whose caller passed these beside the plan.

        One that the plan decides otherwise is a ConfigError.
        """
        if stages != self.stages:
            raise ConfigError(f"plan is for {self.stages} stages, must be for {stages}, as the pipeline has")
        names = ("hint", "limit", "split", "placement", "chunks")
        own: Any = {name: getattr(self, name) for name in names}
        for name, value in own.items():
            if passed.get(name) not in (None, value):
                raise ConfigError(f"{name} is {passed.get(name)!r} beside a plan with {value!r}: must not be passed")
        if self.cuts is not None:  # ranks with plans of different cuts are not of one model
            own["partition"] = passed.get("partition") or f"{self.layers} layers, cut at {list(self.cuts)}"
        return cast("OptionArguments", {**passed, **own})

    def layers_of(self, stage: int) -> tuple[range, ...] | None:
        """The layers of each chunk of a stage; None where the plan has no cuts."""
        if self.cuts is None or self.layers is None:
            return None
        parts = [range(*bounds) for bounds in pairwise((0, *self.cuts, self.layers))]
        return tuple(parts[v] for v in self.where.virtual_stages(stage))


def _error(name: str, field: str, reason: str) -> ConfigError:
    return ConfigError(f"{name}: {field} {reason}" if field else f"{name}: {reason}")


def _numbers(least: int, what: str, field: str, value: object, *, error: MakeError) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise error(field, f"is {shown(value)}, must be a list of {what} numbers")
    return tuple(whole(field, each, least, error=error) for each in value)


_READERS: dict[str, Reader] = {
    "stages": partial(whole, least=1),
    "chunks": partial(whole, least=1),
    "placement": partial(one_of, ("looped", "v")),
    "hint": text,
    "limit": read_limit,
    "split": flag,
    "cuts": partial(or_none, partial(_numbers, 1, "layer")),
    "layers": partial(or_none, partial(whole, least=1)),
    "recompute": partial(_numbers, 0, "stage"),
}
