"""The methods of the benchmark of mechanisms, and which of them one mechanism sets apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np

from benchmarks.paper.claims import TABLE_1, TABLE_7, Setting
from benchmarks.shared.comparison import Comparison, Method, Runtime, Turn
from benchmarks.shared.tables import Form
from rrfp.costs import CostTable
from rrfp.pipeline.options import OptionArguments


def _rrfp(form: Form, **options: Any) -> Method:
    return Method(Runtime.RRFP, form, cast("OptionArguments", {**options, "split": form is Form.SPLIT}))


BLOCKING, STRICT, AS_HINT, BF_EQUAL = "blocking 1F1B", "strict 1f1b", "1f1b as a hint", "bf, 1f1b"
BF, BFW, DEFAULT, WORST = "bf, 2n", "bfw, 2n", "default, 2n", "f-priority, 2n"
DEFAULT_1F1B, DEFAULT_N, AUTO = "default, 1f1b", "default, n", "default, auto"
LATE_STRICT, LATE_BLOCKING = "strict 1f1b, 5 ms late", "blocking 1F1B, 5 ms late"

#: By method, by how many seconds each message is reported later than it arrives.
LATE = {f"default, 2n, {milliseconds} ms late": milliseconds / 1e3 for milliseconds in (0, 1, 5, 20)}
DELAYED = {**LATE, LATE_STRICT: 0.005, LATE_BLOCKING: 0.005}

METHODS: Mapping[str, Method] = {
    BLOCKING: Method(Runtime.TORCH, Form.WHOLE),
    STRICT: _rrfp(Form.WHOLE, strict="1f1b"),
    AS_HINT: _rrfp(Form.WHOLE, hint="1f1b", limit="1f1b"),
    BF_EQUAL: _rrfp(Form.WHOLE, hint="bf", limit="1f1b"),
    BF: _rrfp(Form.WHOLE, hint="bf", limit="2n"),
    BFW: _rrfp(Form.SPLIT, hint="bfw", limit="2n"),
    DEFAULT: _rrfp(Form.SPLIT, limit="2n"),
    WORST: _rrfp(Form.WHOLE, hint="f-priority", limit="2n"),
    DEFAULT_1F1B: _rrfp(Form.SPLIT, limit="1f1b"),
    DEFAULT_N: _rrfp(Form.SPLIT, limit="n"),
    AUTO: _rrfp(Form.SPLIT, limit="auto"),
    **{name: _rrfp(Form.SPLIT, limit="2n") for name in LATE},
    LATE_STRICT: _rrfp(Form.WHOLE, strict="1f1b"),
    LATE_BLOCKING: Method(Runtime.TORCH, Form.WHOLE),
}

#: Of each mechanism, the pairs that it sets apart: a method, and the one over which its time is shown.
MECHANISMS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "messages: sends that wait for nobody": ((STRICT, BLOCKING), (LATE_STRICT, LATE_BLOCKING)),
    "readiness: a schedule as a hint": ((AS_HINT, STRICT), (BF_EQUAL, STRICT)),
    "hint": ((BFW, BF), (DEFAULT, BF), (WORST, BF)),
    "limit": ((DEFAULT_1F1B, DEFAULT), (DEFAULT_N, DEFAULT), (AUTO, DEFAULT)),
    "all of them": ((BF, BLOCKING), (BFW, BLOCKING)),
    "late readiness": (*((name, next(iter(LATE))) for name in list(LATE)[1:]), (LATE_STRICT, STRICT)),
}


def paper_ratio(method: str, base: str, profile: str) -> float | None:
    """The paper's time of one method over the other's, on the workload that the profile stands for at TP 1, PP 8."""
    setting = _setting(profile)
    f1b, _, bf, bfw = setting.seconds
    seconds = {BLOCKING: f1b, BF: bf, BFW: bfw}
    if method in seconds and base in seconds:
        return seconds[method] / seconds[base]
    if (method, base, profile) == (WORST, BF, "mllm"):
        return 1 + TABLE_7["f-priority"] / 100
    return None


def _setting(profile: str) -> Setting:
    return next(each for each in TABLE_1 if (each.family, each.tp, each.pp) == (profile, 1, 8))


@dataclass(frozen=True, slots=True)
class Settings(Comparison):
    """See `Comparison`; each profile has one jitter, and ``folder`` is where ranks leave the times of messages."""

    METHODS: ClassVar[Mapping[str, Method]] = METHODS
    PEERS: ClassVar[tuple[str, ...]] = (STRICT,)

    folder: str = ""

    def turns(self) -> Iterator[Turn]:
        """All steps in order."""
        pairs = set(zip(self.profiles, self.jitters, strict=True))
        return (turn for turn in Comparison.turns(self) if (turn.cell.profile, turn.cell.jitter) in pairs)

    def late_table(self, turn: Turn) -> CostTable:
        """The durations of a step, and the latencies that its method adds."""
        table = self.table(turn)
        edges = np.full_like(table.latency_forward, DELAYED.get(turn.method, 0.0))
        return replace(table, latency_forward=edges, latency_backward=edges)
