"""Latency models: the time between the end of a task and the arrival of its output at the next virtual stage.

Every message draws independently, by (seed, step, direction, edge, microbatch), and the same numbers in every model.
`spike` and `bimodal` delay some messages beyond their wire time. A tensor that stays on its stage arrives at once in
every model.

The paper publishes two statistics of its messages, (p95 - p5) / p50 = 58.74 and (p75 - p25) / p50 = 50.80. `spike` has
about the first (48.8) and not the second (1.2), `bimodal` has both (58.6 and 50.7).

A tensor-parallel rank sends to its counterpart of the next stage: `rank_latencies` gives each rank its own, one number
for each edge, microbatch and rank. It knows nothing of groups, coordination or order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rrfp.costs.table import CostTable, Matrix
from rrfp.errors import ConfigError
from rrfp.lab.generators.streams import RandomStream, exp, generator
from rrfp.plain import whole

#: The names of the models, for help texts and errors.
LATENCY_MODELS = ("none", "constant", "constant:SECONDS", "wire", "spike", "bimodal")

#: Seconds of `constant` without a number.
CONSTANT_DEFAULT = 0.001
#: Seconds: the median of the lognormal wire time, and the deviation of its logarithm.
WIRE_MEDIAN, WIRE_SIGMA = 0.0004, 0.5
#: The probability of a spike, and its most seconds (uniform from 0).
SPIKE_PROBABILITY, SPIKE_LONGEST = 0.21, 0.030
#: `bimodal`. For the paper's two statistics between a quarter and a half of the messages must be slow: this is the
#: middle. The times follow from it, the statistics, and the paper's longest message of 30 ms.
BIMODAL_WIRE_FACTOR, BIMODAL_PROBABILITY, BIMODAL_SHORTEST, BIMODAL_LONGEST = 0.8, 0.375, 0.0223, 0.0293

#: By model, the factor on wire times, and the chance, the least and the most of what is added to them.
_LONGER = {
    "spike": (1.0, SPIKE_PROBABILITY, 0.0, SPIKE_LONGEST),
    "bimodal": (BIMODAL_WIRE_FACTOR, BIMODAL_PROBABILITY, BIMODAL_SHORTEST, BIMODAL_LONGEST),
}


def with_latency(table: CostTable, model: str, *, seed: int = 0, step: int = 0) -> CostTable:
    """The same step with its latencies replaced. Every step has its own draws.

    Args:
        table: costs; their latencies are ignored.
        model: none, constant (1 ms), constant:SECONDS, wire (lognormal, median 0.4 ms, sigma 0.5), spike (wire, and
            with probability 0.21 another 0 to 30 ms) or bimodal (0.8 times wire, and with probability 0.375 another
            22.3 to 29.3 ms).
        seed: >= 0.
        step: >= 0.

    Raises:
        ConfigError: if the model is unknown, its seconds are no finite number >= 0, or seed or step is negative.
    """
    seed, step = whole("seed", seed, 0), whole("step", step, 0)
    shape = table.latency_forward.shape
    name, seconds = parse_latency(model)
    if name in ("none", "constant"):
        forward = backward = np.full(shape, seconds)
    else:
        forward = _wire(RandomStream.WIRE_FORWARD, shape, seed, step)
        backward = _wire(RandomStream.WIRE_BACKWARD, shape, seed, step)
    if name in _LONGER:
        factor, *longer = _LONGER[name]
        forward = factor * forward + _delays(RandomStream.SPIKE_FORWARD, shape, seed, step, *longer)
        backward = factor * backward + _delays(RandomStream.SPIKE_BACKWARD, shape, seed, step, *longer)
    forward, backward = replace(table, latency_forward=forward, latency_backward=backward).acting_latencies()
    return replace(table, latency_forward=forward, latency_backward=backward)


def parse_latency(model: str) -> tuple[str, float]:
    """The model's bare name, and the seconds of a constant one."""
    name, colon, argument = str(model).partition(":")
    if not colon and name in LATENCY_MODELS:
        return name, CONSTANT_DEFAULT if name == "constant" else 0.0
    if name != "constant":
        raise ConfigError(f"latency is {model!r}, must be one of: {', '.join(LATENCY_MODELS)}")
    try:
        seconds = float(argument)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ConfigError(f"latency is {model!r}, its seconds must be a finite number >= 0")
    return name, seconds


def _wire(stream: RandomStream, shape: tuple[int, ...], seed: int, step: int) -> Matrix:
    """Lognormal travel times in seconds."""
    rows = [generator(stream, seed, step, v).standard_normal(shape[1]) for v in range(shape[0])]
    return WIRE_MEDIAN * exp(WIRE_SIGMA * np.array(rows, dtype=np.float64).reshape(shape))


def _delays(
    stream: RandomStream,
    shape: tuple[int, ...],
    seed: int,
    step: int,
    probability: float,
    shortest: float,
    longest: float,
) -> Matrix:
    """Seconds of some messages beyond their wire time; 0 for others."""
    rows = [generator(stream, seed, step, v).random((shape[1], 2)) for v in range(shape[0])]
    uniform = np.array(rows, dtype=np.float64).reshape(*shape, 2)
    return np.where(uniform[..., 0] < probability, shortest + (longest - shortest) * uniform[..., 1], 0.0)


#: Edges x microbatches x ranks.
Cube: TypeAlias = npt.NDArray[np.float64]

#: For tables that no model drew: every other rank has the table's latencies of the edge, shuffled.
SHUFFLED = "shuffled"
RANK_LATENCY_MODELS = (*LATENCY_MODELS, SHUFFLED)


@dataclass(frozen=True, slots=True, eq=False)
class RankLatencies:
    """The latencies of every rank's messages: both (V-1) x M x T, in seconds."""

    #: Row v is from the end of F on v to its arrival at v + 1, by microbatch and rank.
    forward: Cube
    #: Row v is from the end of B on v + 1 to its arrival at v, by microbatch and rank.
    backward: Cube

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            cube = np.array(getattr(self, name), dtype=np.float64)
            if cube.ndim != 3 or not cube.shape[2]:
                raise ConfigError(f"{name} has shape {cube.shape}, must be edges x microbatches x ranks")
            if not (np.isfinite(cube) & (cube >= 0)).all():
                raise ConfigError(f"{name} must hold finite numbers >= 0 only")
            cube.setflags(write=False)
            object.__setattr__(self, name, cube)
        if self.forward.shape != self.backward.shape:
            raise ConfigError(f"backward has shape {self.backward.shape}, must be forward's {self.forward.shape}")

    @property
    def ranks(self) -> int:
        return int(self.forward.shape[2])

    @classmethod
    def same_on_all(cls, costs: CostTable, tp: int) -> RankLatencies:
        """The latencies of the table for all ``tp`` ranks."""
        count = whole("tp", tp, 1)
        forward, backward = (np.repeat(rows[:, :, None], count, axis=2) for rows in costs.acting_latencies())
        return cls(forward, backward)

    def slowest(self, costs: CostTable) -> CostTable:
        self.check_fits(costs)
        return replace(costs, latency_forward=self.forward.max(axis=2), latency_backward=self.backward.max(axis=2))

    def check_fits(self, costs: CostTable) -> None:
        """Raise a ConfigError for a table of another shape."""
        if self.forward.shape[:2] != costs.latency_forward.shape:
            expected = (*costs.latency_forward.shape, self.ranks)
            raise ConfigError(f"latencies have shape {self.forward.shape}, must be {expected} for these costs")


def rank_latencies(
    costs: CostTable,
    # The model of the other ranks, which draw independently: a name of `LATENCY_MODELS` (the one that
    # drew the table), or ``"shuffled"``: the table's latencies of the edge in another order.
    model: str,
    tp: int,
    *,
    seed: int = 0,
    step: int = 0,
) -> RankLatencies:
    # A rank's numbers depend on (model, seed, step, rank), its edge and its microbatch alone, not on ``tp``.
    count, seed, step = whole("tp", tp, 1), whole("seed", seed, 0), whole("step", step, 0)
    if model != SHUFFLED and str(model).partition(":")[0] not in LATENCY_MODELS:
        raise ConfigError(f"latency is {model!r}, must be one of: {', '.join(RANK_LATENCY_MODELS)}")
    of_table = costs.acting_latencies()
    drawn = [of_table]
    for rank in range(1, count):
        if model == SHUFFLED:
            drawn.append(_shuffled(of_table, seed, step, rank))
        else:
            rank_seed = int(generator(RandomStream.RANK, seed, rank).integers(2**63))
            drawn.append(with_latency(costs, model, seed=rank_seed, step=step).acting_latencies())
    forward, backward = (np.stack([pair[direction] for pair in drawn], axis=2) for direction in range(2))
    return RankLatencies(forward, backward)


def _shuffled(latencies: tuple[Matrix, Matrix], seed: int, step: int, rank: int) -> tuple[Matrix, Matrix]:
    random = generator(RandomStream.RANK, seed, rank, step)
    forward, backward = (random.permuted(rows, axis=1) for rows in latencies)
    return forward, backward
