"""Latencies of tensor-parallel ranks: rank t of a stage sends to rank t of the next, each message with its latency.

It turns a cost table into one number for each edge, microbatch and rank, and knows nothing of groups, coordination or
order. The latencies of rank 0 are the table's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rrfp.costs.table import CostTable, Matrix
from rrfp.errors import ConfigError
from rrfp.lab.generators.latency import LATENCY_MODELS, with_latency
from rrfp.lab.generators.streams import RandomStream, generator
from rrfp.plain import whole

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
        """T, the ranks of a group."""
        return int(self.forward.shape[2])

    @classmethod
    def same_on_all(cls, costs: CostTable, tp: int) -> RankLatencies:
        """The latencies of the table for all ``tp`` ranks."""
        count = whole("tp", tp, 1)
        forward, backward = (np.repeat(rows[:, :, None], count, axis=2) for rows in costs.acting_latencies())
        return cls(forward, backward)

    def slowest(self, costs: CostTable) -> CostTable:
        """The table of the group as one rank, its slowest."""
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
    """Draw the latencies of ``tp`` ranks for one step."""
    # A rank's numbers depend on (model, seed, step, rank), its edge and its microbatch alone, not on ``tp``.
    count, seed, step = whole("tp", tp, 1), whole("seed", seed, 0), whole("step", step, 0)
    if model != SHUFFLED and model.partition(":")[0] not in LATENCY_MODELS:
        raise ConfigError(f"latency is {model!r}, must be one of {', '.join(RANK_LATENCY_MODELS)}")
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
    """The latencies of each edge, in ``rank``'s random order."""
    random = generator(RandomStream.RANK, seed, rank, step)
    forward, backward = (random.permuted(rows, axis=1) for rows in latencies)
    return forward, backward
