"""The state of a pipeline between two steps, as plain data: what a run needs to go on where it was left."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rrfp.errors import ConfigError, ProtocolError
from rrfp.log import get_logger
from rrfp.memory.measured import Measured
from rrfp.model.tasks import Kind
from rrfp.model.topology import Topology
from rrfp.pipeline.method import DispatchMethod
from rrfp.pipeline.options import Options, seed_of
from rrfp.plain import one_of
from rrfp.runtime import records

logger = get_logger(__name__)

#: Of the format below. A later one reads the earlier ones.
VERSION = 1

#: What a difference in a field changes; in all of these a run can go on.
_CONSEQUENCES = {
    "hint": "the order of tasks changes, and without deterministic=True the last bits of gradients",
    "limit": "the memory held and the order of tasks change, and without deterministic=True the last bits of gradients",
    "strict": "the order of tasks changes, and without deterministic=True the last bits of gradients",
    "order": "the order of tasks changes, and without deterministic=True the last bits of gradients",
    "deterministic": "the order in which gradients are added changes, and with it their last bits",
    "virtual_stages": "dropout draws other numbers than before, and measured sizes and durations are not used",
    "names": (
        "dropout draws other numbers than before, and measured sizes and durations are used where the name is the same"
    ),
}


@dataclass(frozen=True, slots=True)
class PipelineState:
    """The fields of a state, as `rrfp.Pipeline.state_dict` returns them."""

    version: int
    #: The number of the next training step: how many were completed since the start of the run.
    step: int
    #: Of the random numbers of tasks.
    seed: int
    #: By name; None beside a strict schedule.
    hint: str | None
    #: As text; None beside a strict schedule.
    limit: str | None
    #: The schedule that is run strictly, or None.
    strict: str | None
    deterministic: bool
    virtual_stages: int
    #: Of the rank; with all stages in one process, 0.
    stage: int
    #: Of the rank; those of a coordinated ``dp`` dim count too, since they have data of their own.
    replica: int
    #: On the virtual stages of this process.
    measured: tuple[Measured, ...]
    #: Of the virtual stages; empty for a chain, and in states saved before they had names.
    names: tuple[str, ...] = ()
    #: The option; free in states saved before it was one.
    order: str = "free"

    @classmethod
    def of(
        cls,
        options: Options,
        topology: Topology,
        virtual_stages: int,
        step: int,
        measured: Sequence[Measured],
        names: Sequence[str] = (),
    ) -> PipelineState:
        """The state of a pipeline with ``options`` after ``step`` training steps."""
        method = DispatchMethod(options)
        return cls(
            VERSION,
            step,
            seed_of(options),
            method.hint_name,
            method.limit_text,
            method.strict,
            options.deterministic,
            virtual_stages,
            topology.stage,
            topology.data_rank,
            tuple(measured),
            tuple(names),
            options.order,
        )

    @classmethod
    def read(cls, plain: Any) -> PipelineState:
        """Read what `rrfp.Pipeline.state_dict` returned, also after JSON or msgpack."""
        if not isinstance(plain, Mapping) or "version" not in plain:
            raise ConfigError(f"state is {reprlib.repr(plain):.80}, must be a dict that state_dict() returned")
        if type(plain["version"]) is not int or plain["version"] != VERSION:
            raise ConfigError(
                f"state: version is {reprlib.repr(plain['version'])}, must be {VERSION}, the one that this RRFP reads"
            )
        try:
            state = records.from_plain(cls, {"names": [], "order": "free", **plain}, "state")
        except ProtocolError as error:
            raise ConfigError(str(error)) from None
        for field, least, value in state._numbers():
            if not least <= value < (2**63 if type(value) is int else math.inf):
                raise ConfigError(f"state: {field} is {value}, must be at least {least} and finite")
        if state.names and len(set(state.names)) != state.virtual_stages:
            raise ConfigError(f"state: names is {state.names!r:.80}, must be {state.virtual_stages} different texts")
        for each in state.measured:
            for spent in each.durations:
                one_of(list(Kind), "state: kind", spent.kind)
        return state

    def _numbers(self) -> Iterator[tuple[str, int, float]]:
        """The numbers that must not be below some least: (field, least, value)."""
        yield "step", 0, self.step
        yield from (("virtual_stages", 1, self.virtual_stages), ("stage", 0, self.stage), ("replica", 0, self.replica))
        for each in self.measured:
            yield "virtual_stage", 0, each.virtual_stage
            for spent in each.durations:
                yield from (("count", 1, spent.count), ("seconds", 0, spent.seconds))
            for size in (*each.training_sizes, *each.evaluation_sizes):
                yield from (("held", 0, size.held), ("growth", 0, size.growth), ("growth_share", 0, size.growth_share))

    def check_fits(self, own: PipelineState) -> None:
        """Compare with the pipeline whose state is ``own``, which loads this one: warn, or refuse."""
        if self.seed != own.seed:
            raise ConfigError(
                f"seed is {own.seed}, must be {self.seed}, as in the state: random numbers of tasks depend on it"
            )
        unknown = "virtual_stages" if self.names and own.names else "names"
        for field, consequence in _CONSEQUENCES.items():
            before, now = _text(getattr(self, field)), _text(getattr(own, field))
            if before != now and field != unknown:
                logger.warning(
                    "the state was saved with %s %s, this pipeline has %s: %s", field, before, now, consequence
                )

    def for_pipeline(self, own: PipelineState) -> PipelineState:
        """What the pipeline whose state is ``own`` takes from this one: measured values of virtual stages it has.

        They are matched by name where both have names, else by number if both have as many.
        """
        if not (self.names and own.names):
            return self if self.virtual_stages == own.virtual_stages else replace(self, measured=())
        numbers = {name: v for v, name in enumerate(own.names)}
        moved = (
            replace(each, virtual_stage=numbers[name])
            for each in self.measured
            if each.virtual_stage < len(self.names) and (name := self.names[each.virtual_stage]) in numbers
        )
        return replace(self, measured=tuple(moved))


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
