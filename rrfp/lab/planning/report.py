"""The plans that were tried, as text and as the file that a pipeline takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rrfp.lab.advice.replays import Interval
from rrfp.lab.advice.report import DOUBTFUL
from rrfp.pipeline.plan_file import PLAN, Plan


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate."""

    name: str
    #: The mean step, for as many microbatches as the recorded ones have.
    seconds: float
    #: The part that it saves of the step as it runs now.
    saved: Interval
    #: The most that a stage held, in microbatches and in bytes; 0 bytes where the trace has none.
    held: float
    num_bytes: int
    placement: str
    #: The numbers of layers of the virtual stages; empty where they are not known.
    layers: str
    settings: str
    #: For a pipeline; None of a strict schedule.
    plan: Plan | None
    #: The cut as others take it, by their names; None where they cannot have it.
    others: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), PLAN: None if self.plan is None else self.plan.to_plain()}


@dataclass(frozen=True, slots=True)
class Plans:
    """The result of `rrfp plan`.

    Attributes:
        name: of the trace and the run, or of the file of layers.
        steps: recorded steps; 0 where nothing has run.
        left_out: of them, one line a reason.
        method: how the job ran.
        measured: seconds of the mean step; None where nothing has run.
        predicted: seconds of the mean step, by the engine.
        rebuilt: the same from layers, beside a trace; None where layer times are not known.
        now: as it runs now, or as the file cuts it.
        rows: the best first.
        guessed: the best with a split backward, where nobody has measured what weight gradients take.
        peers: torch's schedules.
        tried: what was tried, as a clause.
        skipped: what was not, one line each.
        assumed: what the trace does not say, one line each.
        doubt: why the prediction is off by more than 5%; empty where it is not.
        is_interrupted: whether Ctrl-C ended the search.
    """

    name: str
    steps: int
    left_out: tuple[str, ...]
    method: str
    measured: float | None
    predicted: float
    rebuilt: float | None
    now: Row
    rows: tuple[Row, ...]
    guessed: Row | None
    peers: tuple[Row, ...]
    tried: str
    skipped: tuple[str, ...]
    assumed: tuple[str, ...]
    doubt: str
    is_interrupted: bool

    @property
    def best(self) -> Row | None:
        """The first row; None where nothing fits the budget."""
        return self.rows[0] if self.rows else None

    def to_json(self) -> dict[str, Any]:
        """Plain data: the file's, whose field ``plan`` a pipeline takes."""
        best = None if self.best is None or self.best.plan is None else self.best.plan.to_plain()
        lists = {"rows": [row.to_json() for row in self.rows], "peers": [row.to_json() for row in self.peers]}
        guessed = None if self.guessed is None else self.guessed.to_json()
        return {PLAN: best, **asdict(self), **lists, "now": self.now.to_json(), "guessed": guessed}

    def __str__(self) -> str:
        beside = [] if self.guessed is None else [self.guessed]
        rows = [*self.rows, self.now, *beside, *self.peers]
        lines = [*self._head(), "", *_table(rows, has_draws=self.measured is not None)]
        if any("*" in row.layers for row in rows):
            lines += ["", "Layers: 4*2 stands for two virtual stages of four layers each, one after the other."]
        if self.best is None:
            lines += ["", "No candidate holds as little as the budget allows."]
        for name, cut in () if self.best is None else self.best.others.items():
            lines += ["", f"The cut of 1 for {name}:", f"  {'none: ' + name + ' has no V' if cut is None else cut}"]
        ended = ", until Ctrl-C" if self.is_interrupted else ""
        lines += ["", f"Tried{ended}: {self.tried}.", "Left out:", *(f"  {line}" for line in self.skipped)]
        lines += ["", "Assumed:", *(f"  {line}" for line in self.assumed)] if self.assumed else []
        return "\n".join(lines)

    def _head(self) -> Iterator[str]:
        from rrfp.trace.breakdown_table import duration

        if self.measured is None:
            yield f"{self.name}: no step has run, {self.method}"
            yield f"a step as the file cuts the model: predicted {duration(self.predicted)}"
            return
        left_out = f" (left out: {', '.join(self.left_out)})" if self.left_out else ""
        yield f"{self.name}: {self.steps} steps{left_out}, {self.method}"
        rebuilt = "" if self.rebuilt is None else f", rebuilt from its layers {duration(self.rebuilt)}"
        ratio = f"({self.predicted / self.measured:.3f} of it)"
        yield f"a step took {duration(self.measured)}; replayed {duration(self.predicted)} {ratio}{rebuilt}"
        if self.doubt:
            yield f"  doubtful, as it is off by more than {DOUBTFUL:.0%}: {self.doubt}"


def _table(rows: Sequence[Row], *, has_draws: bool) -> list[str]:
    """Aligned columns, without those that no row has."""
    from rrfp.trace.breakdown_table import duration

    heads = ("", "predicted", "saved", "held", "bytes", "placement", "layers", "settings")
    cells = [heads]
    for row in rows:
        num_bytes = f"{row.num_bytes / 1e6:.0f} MB" if row.num_bytes >= 5e5 else ""
        saved = str(row.saved) if has_draws else f"{100 * row.saved.value:.1f}%"
        figures = (row.name, duration(row.seconds), saved, f"{row.held:g}", num_bytes)
        cells.append((*figures, row.placement, row.layers, row.settings))
    kept = [n for n in range(len(heads)) if n == 0 or any(line[n] for line in cells[1:])]
    widths = {n: max(len(line[n]) for line in cells) for n in kept}
    right = range(1, 5)
    return [
        "  ".join(line[n].rjust(widths[n]) if n in right else line[n].ljust(widths[n]) for n in kept).rstrip()
        for line in cells
    ]
