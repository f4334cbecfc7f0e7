"""The comparison with other systems: its cells, a second run beside the first, and aims that were missed."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.evidence.results import MARK, NOTHING, PEERS, PEERS_AGAIN, PEERS_ON_ANOTHER_DAY, markdown, missing, read
from benchmarks.peers.aims import (
    BEHIND,
    CPU,
    END,
    OVER,
    OVER_TOLERATED,
    STRICT,
    TOLERATED,
    TOLERATED_BEHIND,
    TOLERATED_CPU,
    TOLERATED_POINTS,
    V_OVER_ZBV,
)
from benchmarks.peers.settings import METHODS, PEERS_OF_1F1B, TORCH_ZBV, peer_in_cpu, peer_in_time
from benchmarks.shared.comparison import Cell, Runtime

_SHOWN = ("torch 1F1B", "torch ZBV", "Megatron 1F1B", "DeepSpeed 1F1B")

Row = Mapping[str, Any]


class Where(NamedTuple):
    """One method in one cell."""

    cell: Cell
    method: str


def rows_of(document: Any) -> dict[Where, Row]:
    """The rows of a result file."""
    return {Where(Cell(row["stages"], row["profile"], row["jitter"]), row["method"]): row for row in document["cells"]}


def cells(document: Any) -> Iterator[str]:
    """A table for each cell."""
    rows = rows_of(document)
    for cell in dict.fromkeys(where.cell for where in rows):
        own = [row for where, row in rows.items() if where.cell == cell]
        peers = [name for name in _SHOWN if Where(cell, name) in rows]
        columns = ("/ bound [95%]", "order alone", *(f"/ {name} (orders)" for name in peers))
        yield f"{cell}:"
        yield ""
        head = ("method", *columns, "held (sum)", "MiB (sum)", "CPU ms a task", "steps")
        yield from markdown(head, (_cell_row(row, peers) for row in own))
        yield ""


def _cell_row(row: Row, peers: Sequence[str]) -> tuple[str, ...]:
    over = [row["over"].get(name) for name in peers]
    return (
        row["method"] + (f" {MARK}" if row["disturbed"] else ""),
        str(_per_bound(row)),
        f"{row['engine_over_bound']:.3f}",
        *(f"{each['value']:.3f} ({each['engine']:.3f})" if each else NOTHING for each in over),
        f"{row['held_microbatches']:g} ({row['held_microbatches_sum']:g})",
        f"{row['held_bytes'] / 2**20:,.0f} ({row['held_bytes_sum'] / 2**20:,.0f})",
        f"{row['cpu_ms_task']:.2f}",
        str(row["steps"]),
    )


def finished(document: Any) -> Iterator[str]:
    """Every cell of a run that goes on, how many it was to have, and what is to be explained."""
    found = {where.cell for where in rows_of(document)}
    settings = document["settings"]
    days = ", ".join(settings["days"])
    yield f"{len(found)} of {settings['asked']} cells have all their steps, and are shown; measured on {days}."
    yield ""
    yield from cells(document)
    yield from _missed([document], ["measured"], kinds=_TO_EXPLAIN | _DEFECTS)


# Two runs.


@dataclass(frozen=True, slots=True)
class Measured:
    """A median, and its interval of 95%."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}-{self.high:.3f}]"

    def gap(self, other: Measured) -> float:
        """How far the intervals are from each other; 0 where they overlap."""
        return max(self.low - other.high, other.low - self.high, 0.0)

    def over(self, factor: float) -> Measured:
        """Divided by it."""
        return Measured(self.value / factor, self.low / factor, self.high / factor)

    def plus(self, term: float) -> Measured:
        """More by it."""
        return Measured(self.value + term, self.low + term, self.high + term)


def _per_bound(row: Row) -> Measured:
    return Measured(row["over_bound"], row["low"], row["high"])


def _per_order(row: Row) -> Measured:
    return Measured(*(row[f"over_executed_{name}"] for name in ("order", "low", "high")))


def _per_peer(row: Row, peer: str) -> Measured:
    return Measured(*(row["over"][peer][name] for name in ("value", "low", "high")))


class Runs:
    """Two runs of the same methods on the same tables.

    Args:
        first: the document of one.
        second: the other's.

    Attributes:
        common: rows that both have and that neither marks as disturbed.
    """

    def __init__(self, first: Any, second: Any) -> None:
        self._rows = rows_of(first), rows_of(second)
        one, two = self._rows
        self.common = [w for w in one if w in two and not one[w]["disturbed"] and not two[w]["disturbed"]]
        self.cells = list(dict.fromkeys(where.cell for where in self.common))

    def per_bound(self, where: Where) -> tuple[Measured, Measured]:
        """Of both runs."""
        one, two = self._rows
        return _per_bound(one[where]), _per_bound(two[where])

    def per_peer(self, cell: Cell) -> Iterator[tuple[Where, str, Measured, Measured]]:
        """The methods of RRFP over each peer, of both runs."""
        one, two = self._rows
        for where in self._of(cell):
            if METHODS[where.method].runtime is Runtime.RRFP:
                for peer in one[where]["over"]:
                    if Where(cell, peer) in self.common:
                        yield where, peer, _per_peer(one[where], peer), _per_peer(two[where], peer)

    def change(self, where: Where) -> float:
        """The second run's step over the first's, each over its bound."""
        first, second = self.per_bound(where)
        return second.value / first.value

    def changes(self, cell: Cell) -> list[float]:
        """Of all methods."""
        return [self.change(where) for where in self._of(cell)]

    def drift(self, cell: Cell) -> float:
        """By what the machine, which all methods share, was slower in the second run: their median."""
        return median(self.changes(cell))

    def _processor_time(self, cell: Cell) -> float:
        """A task's in the second run over the first's, median: how much slower the machine's cores were."""
        one, two = self._rows
        return float(median(two[where]["cpu_ms_task"] / one[where]["cpu_ms_task"] for where in self._of(cell)))

    def _of(self, cell: Cell) -> list[Where]:
        return [where for where in self.common if where.cell == cell]

    def summary(self) -> Iterator[tuple[str, ...]]:
        """A row for each cell."""
        for cell in self.cells:
            changes, own = self.changes(cell), self._of(cell)
            alike = sum(first.gap(second) == 0 for first, second in map(self.per_bound, own))
            ratios = [(first, second) for _, _, first, second in self.per_peer(cell)]
            moved = [second.value / first.value for first, second in ratios]
            yield (
                str(cell),
                f"{self._processor_time(cell):.2f}",
                f"{self.drift(cell):.3f} ({min(changes):.3f} to {max(changes):.3f})",
                f"{alike} of {len(own)}",
                f"{median(moved):.3f} ({min(moved):.3f} to {max(moved):.3f})",
                f"{sum(first.gap(second) == 0 for first, second in ratios)} of {len(ratios)}",
            )

    def apart(self) -> Iterator[tuple[str, ...]]:
        """A row for each figure whose intervals do not overlap, and why."""
        for cell in self.cells:
            for where in self._of(cell):
                first, second = self.per_bound(where)
                if gap := first.gap(second):
                    yield self._row(cell, f"{where.method} / bound", first, second, gap, self._why_bound(where))
            for where, peer, first, second in self.per_peer(cell):
                if gap := first.gap(second):
                    why = self._why_peer(where, Where(cell, peer))
                    yield self._row(cell, f"{where.method} / {peer}", first, second, gap, why)

    def _row(self, cell: Cell, name: str, first: Measured, second: Measured, gap: float, why: str) -> tuple[str, ...]:
        return str(cell), name, str(first), str(second), f"{gap:.3f}", why

    def _why_bound(self, where: Where) -> str:
        first, second = self.per_bound(where)
        drift = self.drift(where.cell)
        rest = first.gap(second.over(drift))
        machine = f"the steps of all methods took {drift:.3f} times as long"
        return machine if rest == 0 else f"{machine}; beyond that {rest:.3f} apart"

    def _why_peer(self, own: Where, peer: Where) -> str:
        drift = self.drift(own.cell)
        moved = max((own, peer), key=lambda where: abs(self.change(where) - drift))
        return f"{moved.method}'s step took {self.change(moved):.3f} times as long, the median method's {drift:.3f}"


def twice(root: Path) -> str:
    """The second run of the headline beside the first."""
    return _beside_first(root, PEERS_AGAIN)


def on_another_day(root: Path) -> str:
    """A run of the headline on another day beside the first."""
    return _beside_first(root, PEERS_ON_ANOTHER_DAY)


def _beside_first(root: Path, other: str) -> str:
    first, second = read(root, PEERS), read(root, other)
    if first is None or second is None:
        return missing(PEERS if first is None else other)
    runs = Runs(first, second)
    head = ("cell", "CPU a task", "/ bound", "overlap", "/ a peer", "overlap")
    lines = [*_times_of_day(first, second), *markdown(head, runs.summary())]
    if apart := list(runs.apart()):
        lines += ["", "Apart:", "", *markdown(("cell", "figure", "first", "second", "apart by", "why"), apart)]
    return "\n".join(lines)


def _times_of_day(first: Any, second: Any) -> Iterator[str]:
    one, two = first["settings"], second["settings"]
    if "began" in one:
        when = f"at {two['began']}" if "began" in two else f"on {' and '.join(two.get('days', ()))}"
        yield f"The first run began at {one['began']}, the second {when}."
        yield ""


# Aims that were missed.

#: Aims of those kinds are tolerances: a method that misses one has to have a reason.
_TO_EXPLAIN = frozenset({OVER_TOLERATED, BEHIND, TOLERATED})
#: A method that misses one of these has a defect.
_DEFECTS = frozenset(f"{STRICT} {peer}" for peer in PEERS_OF_1F1B)
#: Of two orders one is the shorter if it takes less than this part of the other's time.
_SHORTER = 0.99


def missed(root: Path) -> str:
    """Every aim that a run of the headline misses: by how much, in the other run, and why."""
    first, second = read(root, PEERS), read(root, PEERS_AGAIN)
    if first is None:
        return missing(PEERS)
    documents = [each for each in (first, second) if each is not None]
    return "\n".join(_missed(documents, ["first run", "second run"][: len(documents)]))


def _missed(documents: Sequence[Any], columns: Sequence[str], kinds: Container[str] | None = None) -> Iterator[str]:
    """The aims that one of them misses, or those of ``kinds``; each document has a column of its own."""
    found = [{aim["name"]: aim for aim in document["aims"]} for document in documents]
    names = dict.fromkeys(name for aims in found for name, aim in aims.items() if not aim["met"])
    judged = {name: _judgement(documents, name) for name in names}
    rows = [
        (
            f"{each.method}, {each.kind}",
            str(each.cell),
            _limit(next(aims[name] for aims in found if name in aims)),
            *(_value(aims.get(name)) for aims in found),
            each.why,
        )
        for name, each in judged.items()
        if kinds is None or each.kind in kinds
    ]
    counts = [f"{sum(aim['met'] for aim in aims.values())} of {len(aims)}" for aims in found]
    beyond = sum(each.kind in _TO_EXPLAIN for each in judged.values())
    yield (
        f"Aims that are met: {' and '.join(counts)}. What is to be explained at any rate, more than "
        f"{TOLERATED_POINTS:g} point over the own order beyond the peer's, {TOLERATED_BEHIND - 100:g}% behind the "
        f"orders or {TOLERATED_CPU - 100:g}% more processor time: {beyond or 'no'} {'row' if beyond == 1 else 'rows'}."
    )
    if rows:
        yield ""
        yield from markdown(("aim", "cell", "at most", *columns, "why"), rows)


def _limit(aim: Row) -> str:
    return f"{aim['limit']:g}{_unit(aim)}"


def _value(aim: Row | None) -> str:
    return NOTHING if aim is None else f"{aim['value']:.2f}{_unit(aim)}" + ("" if aim["met"] else " NO")


def _unit(aim: Row) -> str:
    return aim["unit"] if aim["unit"] == "%" else f" {aim['unit']}"


@dataclass(frozen=True, slots=True)
class _Judgement:
    """An aim that was missed."""

    method: str
    kind: str
    cell: Cell
    why: str


def _judgement(documents: Sequence[Any], name: str) -> _Judgement:
    """Why, from the first run that missed it."""
    document = next(d for d in documents if any(aim["name"] == name and not aim["met"] for aim in d["aims"]))
    [limit] = [aim["limit"] for aim in document["aims"] if aim["name"] == name]
    rows = rows_of(document)
    for where in rows:
        for kind, why in _KINDS.items():
            if name == f"{where.method}, {kind}, {where.cell}":
                return _Judgement(where.method, kind, where.cell, why(_Context(document, rows, where, limit)))
    raise KeyError(f"{name}: no such aim")


class _Context(NamedTuple):
    document: Any
    rows: Mapping[Where, Row]
    where: Where
    limit: float

    @property
    def row(self) -> Row:
        return self.rows[self.where]

    def peer(self, name: str) -> Row:
        return self.rows[Where(self.where.cell, name)]


def _why_time(context: _Context, peer: str = "") -> str:
    """Beside what the orders alone give, and how far the rounds scatter."""
    peer = peer or peer_in_time(METHODS[context.where.method])
    ratio, alone = _per_peer(context.row, peer), context.row["over"][peer]["engine"]
    orders = f"over {peer} {ratio}, by the orders alone {alone:.3f}"
    if ratio.low <= alone <= ratio.high:
        return f"{orders}: within the interval, so that the rounds cannot tell the two apart"
    lost, peer_lost = _lost_ms(context.row), _lost_ms(context.peer(peer))
    return f"{orders}; beyond their own orders {lost:.0f} and {peer_lost:.0f} ms; {_why_cpu(context, peer)}"


def _why_v(context: _Context) -> str:
    """The same, where the orders may give less than the aim asks for."""
    alone = context.row["over"][TORCH_ZBV]["engine"]
    if 100 * alone <= context.limit:
        return _why_time(context, TORCH_ZBV)
    return (
        f"over {TORCH_ZBV} {_per_peer(context.row, TORCH_ZBV)}, by the orders alone {alone:.3f}: the aim asks for more"
    )


def _why_over(context: _Context) -> str:
    """Each over its own order, also in ms, as a shorter order loses a greater part; can the rounds tell them apart?"""
    peer = peer_in_time(METHODS[context.where.method])
    own_row, peer_row = context.row, context.peer(peer)
    own, theirs = _per_order(own_row), _per_order(peer_row)
    lost, peer_lost = _lost_ms(own_row), _lost_ms(peer_row)
    text = f"{own} of its own order, {peer} {theirs}, which is {lost:.0f} and {peer_lost:.0f} ms"
    if lost <= peer_lost and own_row["ms"] - lost < _SHORTER * (peer_row["ms"] - peer_lost):
        return f"{text}: no more time, beside a shorter order"
    if own.gap(theirs.plus(context.limit / 100)) == 0:
        return f"{text}: the aim is within these intervals"
    return f"{text}; {_why_cpu(context, peer)}"


def _lost_ms(row: Row) -> float:
    """Beyond its own order."""
    return float(row["ms"] * (1 - 1 / row["over_executed_order"]))


def _why_cpu(context: _Context, peer: str = "") -> str:
    """In all and by the second, as the peer's tasks may be shorter and more."""
    peer = peer or peer_in_cpu(METHODS[context.where.method])
    own, theirs = _Work.of(context, context.where.method), _Work.of(context, peer)
    text = f"a step takes {own.cpu_s:.2f} s of processor time, {peer}'s {theirs.cpu_s:.2f} s"
    if own.tasks < theirs.tasks:
        text += f", for {own.tasks:,} tasks beside {theirs.tasks:,} that are shorter"
    cores = context.document["settings"]["cores"]
    return f"{text}; its processes keep {own.busy:.2f} of {cores} cores busy, {peer}'s {theirs.busy:.2f}"


def _why_end(context: _Context) -> str:
    peer = peer_in_time(METHODS[context.where.method])
    return f"{peer} ends {context.peer(peer)['end_ms']:.1f} ms after its last task"


@dataclass(frozen=True, slots=True)
class _Work:
    """The processor time of a step."""

    tasks: int
    cpu_s: float
    busy: float

    @classmethod
    def of(cls, context: _Context, method: str) -> _Work:
        row, form = context.peer(method), METHODS[method].form
        count = context.document["settings"]["microbatches"] * row["stages"] * form.chunks
        tasks = count * (3 if form.is_split else 2)
        cpu_s = tasks * row["cpu_ms_task"] / 1e3
        return cls(tasks, cpu_s, cpu_s / (row["ms"] / 1e3))


_KINDS: Mapping[str, Callable[[_Context], str]] = {
    OVER: _why_over,
    OVER_TOLERATED: _why_over,
    BEHIND: _why_time,
    **{f"{STRICT} {peer}": partial(_why_time, peer=peer) for peer in PEERS_OF_1F1B},
    CPU: _why_cpu,
    TOLERATED: _why_cpu,
    V_OVER_ZBV: _why_v,
    END: _why_end,
}
