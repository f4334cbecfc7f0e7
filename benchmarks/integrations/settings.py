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


class Place(StrEnum):
    """What holds the sleeping modules of a rank."""

    PIPELINE = "rrfp.Pipeline"
    STAGES = "torch's pipeline stages"
    CHUNKS = "Megatron's model chunks"
    LAYERS = "DeepSpeed's pipeline module"


@dataclass(frozen=True, slots=True)
class Way(Method):
    """A way to run a step, over the stages of one of the systems.

    Attributes:
        place: whose stages.
        schedule: its class in ``torch.distributed.pipelining``, if it is torch's.
        receives: how its RECVs behave, if it is torch's; all but the first are emulated.
        as_torch: whether RRFP's limit on each rank is what torch's or Megatron's own schedule holds there.
    """

    place: Place = Place.STAGES
    schedule: str = ""
    receives: Receives = Receives.POSTED
    as_torch: bool = False


def torch_way(schedule: str, form: Form, receives: Receives = Receives.POSTED) -> Way:
    """A schedule of torch's."""
    return Way(Runtime.TORCH, form, schedule=schedule, receives=receives)


def rrfp_way(form: Form, limit: str = "", place: Place = Place.STAGES) -> Way:
    """RRFP on another system's stages; without a limit, it holds what that system's own schedule does."""
    options: dict[str, Any] = {"limit": limit} if limit else {}
    if place is Place.STAGES:
        options["split"] = form.is_split
    return Way(Runtime.RRFP, form, cast("OptionArguments", options), place=place, as_torch=not limit)


def megatron_way(form: Form) -> Way:
    """A schedule of Megatron's."""
    return Way(Runtime.MEGATRON, form, place=Place.CHUNKS)


TORCH_1F1B, TORCH_INTERLEAVED, TORCH_ZBV = "torch 1F1B", "torch interleaved", "torch ZBV"

#: Torch's classes and `ScheduleRRFP` with its default hint; the latter's names say where stages lie, and the limit.
SCHEDULES: Mapping[str, Way] = {
    TORCH_1F1B: torch_way("Schedule1F1B", Form.WHOLE),
    TORCH_INTERLEAVED: torch_way("ScheduleInterleaved1F1B", Form.LOOPED),
    TORCH_ZBV: torch_way("ScheduleZBVZeroBubble", Form.V),
    "one, 1f1b": rrfp_way(Form.WHOLE, "1f1b"),
    "one, 2n": rrfp_way(Form.WHOLE, "2n"),
    "one, split, n": rrfp_way(Form.SPLIT, "n"),
    "looped, as torch": rrfp_way(Form.LOOPED),
    "looped, 2n": rrfp_way(Form.LOOPED, "2n"),
    "looped, split, 2n": rrfp_way(Form.LOOPED_SPLIT, "2n"),
    "V, n": rrfp_way(Form.V, "n"),
    "V, 2n": rrfp_way(Form.V, "2n"),
}

#: Of pytorch#172668: torch's interleaved schedule with each kind of RECV, and RRFP on the same stages.
CASE: Mapping[str, Way] = {
    **{f"torch, {receives}": torch_way("ScheduleInterleaved1F1B", Form.LOOPED, receives) for receives in Receives},
    "RRFP, as torch": rrfp_way(Form.LOOPED),
    "RRFP, 2n": rrfp_way(Form.LOOPED, "2n"),
}

MEGATRON_1F1B, MEGATRON_INTERLEAVED = "Megatron 1F1B", "Megatron interleaved"

#: Megatron's schedules, and what `rrfp.integrations.megatron` puts in their place, with its default hint.
MEGATRON: Mapping[str, Way] = {
    MEGATRON_1F1B: megatron_way(Form.WHOLE),
    "RRFP, one, window": rrfp_way(Form.WHOLE, place=Place.CHUNKS),
    "RRFP, one, n": rrfp_way(Form.WHOLE, "n", Place.CHUNKS),
    "RRFP, one, 2n": rrfp_way(Form.WHOLE, "2n", Place.CHUNKS),
    MEGATRON_INTERLEAVED: megatron_way(Form.LOOPED),
    "RRFP, looped, window": rrfp_way(Form.LOOPED, place=Place.CHUNKS),
    "RRFP, looped, n": rrfp_way(Form.LOOPED, "n", Place.CHUNKS),
    "RRFP, looped, 2n": rrfp_way(Form.LOOPED, "2n", Place.CHUNKS),
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
        return self.METHODS[self.methods[0]].place is Place.CHUNKS

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
