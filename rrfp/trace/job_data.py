"""How a job ran, as plain data in a trace file: what a replay of its steps must know beside their times."""

from __future__ import annotations

import operator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rrfp.core.ready_set import MicrobatchOrder
from rrfp.memory.admission import OFFERED_RULES, Limit
from rrfp.plain import Reader, fields_of, flag, one_of, or_none, text, whole

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
        return {**asdict(self), "limit": plain_limit(self.limit)}


def plain_limit(limit: Limit | int | str | None) -> Any:
    if isinstance(limit, Limit):
        return asdict(limit)
    return limit if limit is None or isinstance(limit, str) else operator.index(limit)  # of numpy, perhaps


def read_limit(field: str, value: Any, *, error: Any) -> Any:
    if not isinstance(value, dict):
        return value if value is None or type(value) is int else text(field, value, error=error)
    count = partial(or_none, partial(whole, least=1))
    readers: dict[str, Reader] = {
        "microbatches": count,
        "bytes": count,
        "rule": partial(one_of, OFFERED_RULES),
        "auto": flag,
    }
    value = {"auto": False, **value}
    return Limit(**fields_of(value, readers, error=lambda name, reason: error(f"{field}.{name}", reason)))
