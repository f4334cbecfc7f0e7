"""The advice on recorded steps as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rrfp.lab.advice.replays import Interval

#: A prediction that is further off than this is explained.
DOUBTFUL = 0.05

#: A cause or setting that changes less of the step is not worth a line.
WORTH = 0.005


@dataclass(frozen=True, slots=True)
class Cause:
    """What the steps would take without one cause."""

    name: str
    #: Where, and how much of it.
    text: str
    #: The mean step without it.
    seconds: float
    #: The part of the predicted step that it explains.
    share: Interval


@dataclass(frozen=True, slots=True)
class Setting:
    """What the steps would take with another setting."""

    cause: str
    #: What the trace shows, as a clause.
    reason: str
    #: As the job's code would have it.
    setting: str
    #: The mean step with it; of one with twice as many microbatches, half.
    seconds: float
    #: The part of the predicted step that it saves.
    saved: Interval
    #: The most chunk tasks that a stage would hold.
    held: int
    #: The most that it can save: what it needs to know is not in the trace.
    is_bound: bool = False

    def __str__(self) -> str:
        change = Interval(-self.saved.value, -self.saved.high, -self.saved.low)
        return f"{self.reason}: {self.setting} predicts {'at most ' if self.is_bound else ''}{change}"


@dataclass(frozen=True, slots=True)
class Advice:
    """What slowed recorded steps down, and what a setting would change. ``str()`` of it is the text of `rrfp advise`.

    Attributes:
        name: of the file and the run.
        steps: the numbers of the steps.
        left_out: the others, one line a reason.
        method: how the job ran.
        measured: seconds of the mean step.
        predicted: seconds of the mean step, by the engine.
        held: the most chunk tasks that a stage held, by the engine.
        causes: what the steps would take without each cause, the largest share first.
        settings: what would make them faster, the largest gain first.
        assumed: what the trace does not say, one line each.
        doubt: why the prediction is off by more than 5%; empty where it is not.
    """

    name: str
    steps: tuple[int, ...]
    left_out: tuple[str, ...]
    method: str
    measured: float
    predicted: float
    held: int
    causes: tuple[Cause, ...]
    settings: tuple[Setting, ...]
    assumed: tuple[str, ...]
    doubt: str

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``rrfp advise --json`` prints it."""
        return {**asdict(self), "ratio": self.ratio}

    def __str__(self) -> str:
        from rrfp.trace.breakdown_table import duration

        left_out = f" (left out: {', '.join(self.left_out)})" if self.left_out else ""
        lines = [f"{self.name}: {len(self.steps)} steps{left_out}, {self.method}"]
        took, predicted = duration(self.measured), duration(self.predicted)
        lines += [f"a step took {took}; replayed on the engine {predicted} ({self.ratio:.3f} of it)"]
        lines += [f"  doubtful, as it is off by more than {DOUBTFUL:.0%}: {self.doubt}"] if self.doubt else []
        shown = [cause for cause in self.causes if cause.share.value >= WORTH]
        lines += ["", "Without one cause the step would be shorter by (shares overlap, and do not add up):"]
        lines += [f"  {cause.share!s:>14}  {cause.name}: {cause.text}" for cause in shown]
        lines += [] if shown else [f"  no cause explains {WORTH:.1%} of the step"]
        lines += ["", "Settings (gains overlap too; change one, and record again):"]
        lines += [f"  {setting}" for setting in self.settings]
        lines += [] if self.settings else ["  none that was tried makes the step clearly shorter"]
        lines += ["", "Assumed:", *(f"  {line}" for line in self.assumed)] if self.assumed else []
        return "\n".join(lines)
