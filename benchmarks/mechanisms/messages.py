"""How much the times of messages vary, in real runs: the paper's two statistics."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mechanisms.settings import BLOCKING
from benchmarks.shared.comparison import Cell
from benchmarks.shared.figures import quantile
from rrfp.trace.plain import from_plain
from rrfp.trace.spans import StepTrace, merge


@dataclass(frozen=True, slots=True)
class MessageTimes:
    """The times of one method's messages in a cell: of calls that send and receive, or from sending to filing.

    Attributes:
        method: its name.
        cell: where.
        p50: median, in seconds.
        outer: (p95 - p5) / p50.
        middle: (p75 - p25) / p50.
        count: how many.
    """

    method: str
    cell: Cell
    p50: float
    outer: float
    middle: float
    count: int

    @classmethod
    def of(cls, method: str, cell: Cell, seconds: Sequence[float]) -> MessageTimes:
        """Of at least one message."""
        p5, p25, p50, p75, p95 = (quantile(seconds, share) for share in (0.05, 0.25, 0.5, 0.75, 0.95))
        return cls(method, cell, p50, (p95 - p5) / p50, (p75 - p25) / p50, len(seconds))


def messages_of(folder: Path, stages: int, is_used: Callable[[Cell, int, str], bool]) -> Iterator[MessageTimes]:
    """By cell and method, from what the ranks left in ``folder``; only steps that ``is_used`` says."""
    seconds: dict[tuple[str, Cell], list[float]] = defaultdict(list)
    traces: dict[tuple[str, Cell, int], list[StepTrace]] = defaultdict(list)
    for rank in range(stages):
        plain = json.loads((folder / f"{rank}.json").read_text())
        for (cell, number, method), waits in plain["waits"]:
            if is_used(Cell(*cell), number, method):
                seconds[BLOCKING, Cell(*cell)] += waits
        for (cell, number, method), trace in plain["traces"]:
            if is_used(Cell(*cell), number, method):
                traces[method, Cell(*cell), number].append(from_plain(trace))
    for (method, own, _), parts in traces.items():
        seconds[method, own] += _times(parts)
    for (method, own), each in seconds.items():
        yield MessageTimes.of(method, own, each)


def _times(parts: Iterable[StepTrace]) -> Iterator[float]:
    for message in merge(parts).messages:
        if message.sent is not None and message.arrived is not None:
            yield message.arrived - message.sent
