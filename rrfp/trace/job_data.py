"""A job as plain data in a trace file: how it ran, which a replay must know, and its graph, as in a cost file."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

from rrfp.core.ready_set import MicrobatchOrder
from rrfp.memory.admission import OFFERED_RULES, Limit
from rrfp.model import plain_graph
from rrfp.model.graph import TaskGraph
from rrfp.plain import Reader, fields_of, flag, or_none, shown, text, value_error, whole
from rrfp.trace.spans import Skip

#: What stands for the schedule of a job that replays a logged step.
REPLAY = "replay"

#: The field of a file's ``otherData``.
JOB = "job"


@dataclass(frozen=True, slots=True)
class TracedJob:
    """The options that decide when tasks run, as rank 0 had them."""

    #: By name; None beside a strict schedule.
    hint: str | None
    #: As passed; None beside a strict schedule.
    limit: Limit | int | str | None
    #: The schedule that was run strictly, by name; None with a hint.
    strict: str | None
    order: MicrobatchOrder = "free"
    #: T, the ranks of a group.
    members: int = 1
    #: How they agree on an order.
    coordination: str = "leader"
    #: Whether a lane begins the next task before its core has heard of the end of the last.
    takes_offers: bool = False
    #: Whether the stages are in one process in which their tasks exclude each other.
    is_serial: bool = False

    def to_plain(self) -> dict[str, Any]:
        """JSON-able data."""
        return {**{name: getattr(self, name) for name in _READERS}, "limit": plain_limit(self.limit)}

    @classmethod
    def from_plain(cls, plain: Any) -> Self:
        """Read `to_plain`'s data back; a ValueError names what is wrong."""
        if not isinstance(plain, dict):
            raise ValueError(f"otherData.{JOB} is {shown(plain)}, must be an object")
        return cls(**fields_of(plain, _READERS, error=_error))


def _error(field: str, reason: str) -> ValueError:
    return value_error(f"otherData.{JOB}.{field}", reason)


def _one_of(names: tuple[str, ...], field: str, value: object, *, error: Any) -> Any:
    if value not in names:
        raise error(field, f"is {shown(value)}, must be one of: {', '.join(names)}")
    return value


def plain_limit(limit: Limit | int | str | None) -> Any:
    """A limit as JSON-able data."""
    if isinstance(limit, Limit):
        return asdict(limit)
    return limit if limit is None or isinstance(limit, str) else operator.index(limit)  # of numpy, perhaps


def read_limit(field: str, value: Any, *, error: Any) -> Any:
    """Read `plain_limit`'s data back."""
    if not isinstance(value, dict):
        return value if value is None or type(value) is int else text(field, value, error=error)
    count = partial(or_none, partial(whole, least=1))
    readers: dict[str, Reader] = {
        "microbatches": count,
        "bytes": count,
        "rule": partial(_one_of, OFFERED_RULES),
        "auto": flag,
    }
    value = {"auto": False, **value}
    return Limit(**fields_of(value, readers, error=lambda name, reason: error(f"{field}.{name}", reason)))


_NAME = partial(or_none, text)
_READERS: dict[str, Reader] = {
    "hint": _NAME,
    "limit": read_limit,
    "strict": _NAME,
    "order": partial(_one_of, ("free", "natural")),
    "members": partial(whole, least=1),
    "coordination": partial(_one_of, ("leader", "agreement")),
    "takes_offers": flag,
    "is_serial": flag,
}


#: The argument of a run's name that has its graph, and that of a step that has the skipped virtual stages.
GRAPH, SKIPPED = "graph", "skipped"


def graph_from_plain(plain: Any) -> TaskGraph:
    """Read the argument `GRAPH`; backward counts as whole."""
    fields = plain_graph.PLAIN_FIELDS
    if not isinstance(plain, dict) or not plain.keys() >= set(fields):
        raise ValueError(f"args.{GRAPH} is {reprlib.repr(plain)}, must be an object with {', '.join(fields)}")
    return plain_graph.graph_from_plain(plain)


def skipped_to_plain(skipped: Iterable[Skip], graph: TaskGraph) -> dict[str, list[int]]:
    """The microbatches that skip each virtual stage, by name."""
    plain: dict[str, list[int]] = {}
    for microbatch, v in skipped:
        plain.setdefault(graph.names[v], []).append(microbatch)
    return plain


def skipped_from_plain(plain: Any, graph: TaskGraph | None) -> tuple[Skip, ...]:
    """Read what `skipped_to_plain` wrote."""
    numbers = {} if graph is None else {name: v for v, name in enumerate(graph.names)}
    if not isinstance(plain, Mapping) or not plain.keys() <= numbers.keys():
        raise ValueError(
            f"args.{SKIPPED} is {reprlib.repr(plain)}, must be lists of microbatches by virtual stage: "
            f"{', '.join(numbers) or 'none, as the run has no graph'}"
        )
    skips = []
    for name, microbatches in plain.items():
        field = f"args.{SKIPPED}.{name}"
        if not isinstance(microbatches, list):
            raise value_error(field, f"is {reprlib.repr(microbatches)}, must be a list of microbatches")
        skips += [(whole(field, microbatch, error=value_error), numbers[name]) for microbatch in microbatches]
    return tuple(sorted(skips))
