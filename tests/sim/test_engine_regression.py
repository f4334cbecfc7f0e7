"""What the engine gives for some fixed seeds, to the last bit: speed must never be bought with another timeline.

And what it does to the garbage collector, for the sake of that speed.

The digests are those of the engine as it was first written, before it was made fast; with several chunks they are of
tables made since. They cover every task with its start and end, every wait with its cause, every message, and the
peaks, in the order in which the result lists them. A change that is meant to alter timelines (another rule, another
order among equals) takes new digests: a failing case prints its own.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest

from rrfp import Hint, View
from rrfp.core.ready_set import ForcedOrder, ReadySet
from rrfp.costs import make_costs
from rrfp.engine.engine import run
from rrfp.engine.record import EngineResult
from rrfp.errors import HintError
from rrfp.hints.registry import create_hint, create_strict
from rrfp.memory.admission import Limit
from rrfp.model.placement import Layout
from rrfp.model.tasks import Kind, Task


@dataclass(frozen=True, slots=True)
class Case:
    """One simulated step, and the digest of its result."""

    digest: str
    stages: int
    microbatches: int
    hint: str
    limit: int | str = "2n"
    chunks: int = 1
    placement: Layout = "looped"
    split: bool = False
    jitter: str = "J2"
    latency: str = "spike"
    seed: int = 0
    rule: str = "staircase"
    in_order: bool = False
    strict: bool = False

    def __str__(self) -> str:
        chunks = f"x{self.chunks}{self.placement}" if self.chunks > 1 else ""
        return f"{self.stages}{chunks}-M{self.microbatches}-{self.hint}-{self.limit}-{self.jitter}-{self.latency}"


CASES = [
    Case("0821662bb3639b01", 4, 16, "bf"),
    Case("bb52f2f72599cf21", 4, 16, "bf", limit="1f1b", split=True),
    Case("b77f8ff4aff5ea2e", 8, 40, "bfw", limit=3, split=True, jitter="J3", seed=1),
    Case("2aac3e730622861c", 8, 40, "fb", limit="1f1b", jitter="J1", latency="wire", seed=2),
    Case("f712359ce51adb33", 5, 24, "b-priority", latency="none", jitter="J0"),  # many events at one instant
    Case("913dba1dddc2c937", 5, 24, "f-priority", split=True, latency="constant", jitter="J0"),
    Case("08f26d16ce0b7410", 3, 12, "bf", chunks=2, seed=3),
    Case("2ac2a0aaaa51f035", 4, 12, "bfw", chunks=2, placement="v", split=True, limit=2, seed=4),
    Case("9e4d69a9bbcc25d5", 3, 10, "fb", chunks=3, placement="v", limit=1, latency="none", jitter="J0"),
    Case("9fe7abbdcf99f173", 4, 12, "f-priority", chunks=3, limit="1f1b", rule="paper", seed=5),
    Case("0089d6da0c117766", 3, 12, "bf", chunks=2, split=True, limit=2, rule="paper", seed=6),
    Case("6933179ca2bda9a3", 4, 16, "bf", limit=2, in_order=True, seed=7),
    Case("d70faa91b70c2921", 3, 10, "bfw", chunks=2, split=True, limit=2, in_order=True, seed=8),
    Case("7682ed0f83200c69", 6, 20, "1f1b", seed=9),
    Case("e3ddaa177b16e0fe", 6, 20, "1f1b", strict=True, split=True, seed=10),
    Case("367ca5bcd44b3c9b", 4, 10, "gpipe", strict=True, latency="none"),
    Case("a75a17347ede1017", 64, 32, "bf", limit="1f1b", jitter="J3"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_timeline_is_bitwise_what_it_always_was(case: Case) -> None:
    assert digest(simulate(case)) == case.digest


def test_a_run_leaves_no_garbage_that_only_the_collector_finds() -> None:
    gc.collect()
    gc.disable()
    try:
        simulate(CASES[6])
        assert gc.collect() == 0
    finally:
        gc.enable()


class Failing(Hint):
    """Breaks its contract, and notes whether the collector is on."""

    seen: ClassVar[list[bool]] = []

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        self.seen.append(gc.isenabled())
        return None


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_rests_during_a_run_and_is_then_as_before_even_if_the_run_fails(is_enabled: bool) -> None:
    Failing.seen.clear()
    if not is_enabled:
        gc.disable()
    try:
        with pytest.raises(HintError):
            run(make_costs("llm", 1, 1), [Failing()], [Limit()])
        assert (Failing.seen, gc.isenabled()) == ([False], is_enabled)
    finally:
        gc.enable()


def simulate(case: Case) -> EngineResult:
    """Run the case."""
    costs = make_costs(
        "mllm",
        case.stages,
        case.microbatches,
        chunks=case.chunks,
        placement=case.placement,
        split=case.split,
        seed=case.seed,
        jitter=case.jitter,
        latency=case.latency,
    )
    stages = range(case.stages)
    if case.strict:
        return run(costs, [create_strict(case.hint) for _ in stages], [Limit()] * case.stages)
    counts = [Limit.resolve(case.limit, stage, case.stages).microbatches for stage in stages]
    limits = [Limit(count, rule=case.rule) for count in counts]
    backwards: Collection[ForcedOrder] = {(Kind.B, v) for v in range(costs.num_virtual_stages)}
    hints = [create_hint(case.hint) for _ in stages]
    return run(costs, hints, limits, in_order=backwards if case.in_order else ())


def digest(result: EngineResult) -> str:
    """16 hexadecimal digits that two results share exactly when they are bitwise equal."""
    return hashlib.sha256("\n".join(lines(result)).encode()).hexdigest()[:16]


def lines(result: EngineResult) -> Iterator[str]:
    """Everything in a result, floats to the last bit."""
    yield result.makespan.hex()
    for spans in result.spans:
        yield " ".join(f"{span.stage} {span.task} {span.start.hex()} {span.end.hex()}" for span in spans)
    for wait in result.waits:
        yield f"{wait.stage} {wait.cause} {wait.start.hex()} {wait.end.hex()}"
    for message in result.messages:
        assert message.sent is not None
        assert message.arrived is not None
        ends = f"{message.sent.hex()} {message.arrived.hex()}"
        yield f"{message.source} {message.target} {message.task} {ends} {message.num_bytes}"
    yield " ".join(f"{peaks.held} {peaks.num_bytes} {peaks.received}" for peaks in result.peaks)
