"""What the whole plan of simulated steps gains over the defaults and over torch's schedules, on other steps."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.plan.layered import Model
from rrfp.hints.registry import DEFAULT_HINT
from rrfp.lab.advice.advice import Wishes
from rrfp.lab.planning.layers import ModelLayout
from rrfp.lab.planning.plan import Request, plan_file
from rrfp.lab.simulation import simulate
from rrfp.trace.chrome import write_chrome

#: Steps that are recorded, and the first of those on which the plan is judged.
RECORDED, JUDGED = 10, 100


@dataclass(frozen=True, slots=True)
class Gain:
    """One model.

    Attributes:
        profile: of the model.
        stages: N.
        predicted: what the plan said that it would save, as a part of the default's step.
        saved: what it saved.
        over_1f1b: the same over torch's 1F1B on the even cut.
        over_zbv: the same over torch's ZBV on the even V.
        plan: in words.
        seconds: of one core that the search took.
    """

    profile: str
    stages: int
    predicted: float
    saved: float
    over_1f1b: float
    over_zbv: float
    plan: str
    seconds: float


def gain(model: Model, judged: int, ran: Callable[[], object], **request: Any) -> Gain:
    """Record the even cut under the defaults, plan within the bytes that it held, and run all on other steps."""
    layout = model.even()
    method: Any = {"hint": DEFAULT_HINT, "limit": "2n"}
    steps = [model.costs(layout, step) for step in range(RECORDED)]
    runs = [simulate(step, **method) for step in steps]
    most = max(peaks.num_bytes for run in runs for peaks in run.peaks)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        traces = [
            replace(run.result.trace(n), sizes=step.sizes)
            for n, (run, step) in enumerate(zip(runs, steps, strict=True))
        ]
        write_chrome(path, traces)
        model.write_layers(Path(folder) / "layers.json", layout, RECORDED)
        wanted = Request(Path(folder) / "layers.json", f"{most}B", slow=model.slow, **request)
        began = time.process_time()
        plans = plan_file(str(path), wanted, Wishes(skip_first=0, hint=DEFAULT_HINT, limit="2n"), ran)
        searching = time.process_time() - began
    best = plans.best
    assert best is not None
    assert best.plan is not None
    assert best.plan.cuts is not None
    planned = ModelLayout(best.plan.where, best.plan.cuts)

    def seconds(where: ModelLayout, *, split: bool = False, **how: Any) -> float:
        numbers = range(JUDGED, JUDGED + judged)
        return fmean(simulate(model.costs(where, step, split=split), **how).makespan for step in numbers)

    own = seconds(planned, split=best.plan.split, hint=best.plan.hint, limit=best.plan.limit)
    others = {
        "saved": seconds(layout, **method),
        "over_1f1b": seconds(layout, strict="1f1b"),
        "over_zbv": seconds(model.even(2, "v"), split=True, strict="zb-v"),
    }
    text = f"{best.placement}: {best.layers}; {best.plan.hint}, split {best.plan.split}"
    saved = {name: 1 - own / other for name, other in others.items()}
    return Gain(model.profile, model.stages, best.saved.value, plan=text, seconds=searching, **saved)
