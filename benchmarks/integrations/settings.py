"""The methods, tables and sizes of all comparisons; shared by their command and its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, cast

import numpy as np

from benchmarks.shared.comparison import NUM_BYTES, Comparison, Method, Runtime, Turn
from benchmarks.shared.tables import CHUNKS, Form
from rrfp.costs import CostTable
from rrfp.pipeline.options import OptionArguments


class Receives(StrEnum):
    """How a RECV of torch's schedules behaves."""

    POSTED = "posted"
    STREAM = "stream"
    OCCUPIED = "occupied"


@dataclass(frozen=True, slots=True)
class Way(Method):
    """A schedule over torch's pipeline stages, or over Megatron's model chunks.

    Attributes:
        receives: how its RECVs behave, if it is torch's; all but the first are emulated.
        as_torch: whether RRFP's limit on each rank is what torch's or Megatron's own schedule holds there.
    """

    receives: Receives = Receives.POSTED
    as_torch: bool = False


def _torch(form: Form, receives: Receives = Receives.POSTED) -> Way:
    return Way(Runtime.TORCH, form, receives=receives)


def _rrfp(form: Form, limit: str = "") -> Way:
    options: dict[str, Any] = {"split": form.is_split} | ({"limit": limit} if limit else {})
    return Way(Runtime.RRFP, form, cast("OptionArguments", options), as_torch=not limit)


TORCH_1F1B, TORCH_INTERLEAVED, TORCH_ZBV = "torch 1F1B", "torch interleaved", "torch ZBV"

#: Torch's classes and `ScheduleRRFP` with its default hint; the latter's names say where stages lie, and the limit.
SCHEDULES: Mapping[str, Way] = {
    TORCH_1F1B: _torch(Form.WHOLE),
    TORCH_INTERLEAVED: _torch(Form.LOOPED),
    TORCH_ZBV: _torch(Form.V),
    "one, 1f1b": _rrfp(Form.WHOLE, "1f1b"),
    "one, 2n": _rrfp(Form.WHOLE, "2n"),
    "one, split, n": _rrfp(Form.SPLIT, "n"),
    "looped, as torch": _rrfp(Form.LOOPED),
    "looped, 2n": _rrfp(Form.LOOPED, "2n"),
    "looped, split, 2n": _rrfp(Form.LOOPED_SPLIT, "2n"),
    "V, n": _rrfp(Form.V, "n"),
    "V, 2n": _rrfp(Form.V, "2n"),
}

#: Of pytorch#172668: torch's interleaved schedule with each kind of RECV, and RRFP on the same stages.
CASE: Mapping[str, Way] = {
    **{f"torch, {receives}": _torch(Form.LOOPED, receives) for receives in Receives},
    "RRFP, as torch": _rrfp(Form.LOOPED),
    "RRFP, 2n": _rrfp(Form.LOOPED, "2n"),
}

MEGATRON_1F1B, MEGATRON_INTERLEAVED = "Megatron 1F1B", "Megatron interleaved"

#: Megatron's schedules, and what `rrfp.integrations.megatron` puts in their place, with its default hint.
MEGATRON: Mapping[str, Way] = {
    MEGATRON_1F1B: Way(Runtime.MEGATRON, Form.WHOLE),
    "RRFP, one, window": _rrfp(Form.WHOLE),
    "RRFP, one, n": _rrfp(Form.WHOLE, "n"),
    "RRFP, one, 2n": _rrfp(Form.WHOLE, "2n"),
    MEGATRON_INTERLEAVED: Way(Runtime.MEGATRON, Form.LOOPED),
    "RRFP, looped, window": _rrfp(Form.LOOPED),
    "RRFP, looped, n": _rrfp(Form.LOOPED, "n"),
    "RRFP, looped, 2n": _rrfp(Form.LOOPED, "2n"),
}

#: The workload of `CASE`, with the levels of its jitter: the deviation of a factor's logarithm.
CASE_PROFILE = "pytorch#172668"
CASE_JITTERS: Mapping[str, float] = {"none": 0.0, "log-normal 0.4": 0.4}

#: Seconds of each task of `CASE`, before jitter.
_CASE_FORWARD, _CASE_BACKWARD = 0.020, 0.040

#: Bytes of tensors where transfer is not the question: in `CASE`, which is about order.
SMALL = 4 << 10


@dataclass(frozen=True, slots=True)
class Settings(Comparison):
    """See `Comparison`.

    Attributes:
        num_bytes: of every tensor between virtual stages.
    """

    METHODS: ClassVar[Mapping[str, Way]] = {**SCHEDULES, **CASE, **MEGATRON}
    PEERS: ClassVar[tuple[str, ...]] = tuple(name for name, way in METHODS.items() if way.runtime is not Runtime.RRFP)

    num_bytes: int = NUM_BYTES

    @property
    def runs_megatron(self) -> bool:
        """Whether its stages are chunks of a Megatron model."""
        return self.methods[0] in MEGATRON

    def table(self, turn: Turn, form: Form | None = None) -> CostTable:
        """See `Comparison.table`."""
        if turn.cell.profile != CASE_PROFILE:
            return Comparison.table(self, turn, form)
        return case_table(self.stages, self.microbatches, turn.cell.jitter, seed=self.seed, step=turn.number)

    def reference(self, turn: Turn) -> CostTable:
        """See `Comparison.reference`; the case of pytorch#172668 has one table for all."""
        return self.table(turn) if turn.cell.profile == CASE_PROFILE else Comparison.reference(self, turn)

    def own_limit(self, way: Way, rank: int) -> int:
        """The most microbatches that torch's or Megatron's schedule of the form of ``way`` holds, rounded up."""
        # Whole ones: all chunks but the deepest leave it the last slot, so the half is seldom held.
        return self.stages - rank if way.form.chunks == 1 else -(-self.held_by_torch(rank) // CHUNKS)

    def held_by_torch(self, rank: int) -> int:
        """The most chunk tasks that torch's interleaved schedule holds on ``rank``, and Megatron's."""
        rounds = max(1, self.microbatches // self.stages)
        warm_up = (CHUNKS - 1) * (self.microbatches // rounds) + 2 * (self.stages - 1 - rank)
        return min(warm_up + 1, CHUNKS * self.microbatches)


def case_table(stages: int, microbatches: int, jitter: str, *, seed: int, step: int) -> CostTable:
    """Two looped chunks a stage, F 20 ms and B 40 ms, times one factor for both by microbatch and virtual stage."""
    shape = CHUNKS * stages, microbatches
    factors = np.exp(CASE_JITTERS[jitter] * np.random.default_rng([seed, step]).standard_normal(shape))
    none = np.zeros((shape[0] - 1, microbatches))
    return CostTable(
        stages=stages,
        chunks=CHUNKS,
        placement="looped",
        microbatches=microbatches,
        forward=_CASE_FORWARD * factors,
        backward=_CASE_BACKWARD * factors,
        weight=None,
        latency_forward=none,
        latency_backward=none,
    )
