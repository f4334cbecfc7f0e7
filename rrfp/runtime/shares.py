"""What each rank shares with all others in a step, and the losses that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rrfp.compute.weighting import Reduction
from rrfp.core.topology import Topology


@dataclass(frozen=True, slots=True)
class WeightShare:
    """A rank's part of the weights of a step.

    Attributes:
        weight: the sum of the weights of its losses; 0 where it computes none.
        reduces: whether it sums gradients over replicas.
    """

    weight: float
    reduces: bool


@dataclass(frozen=True, slots=True)
class VisitShare:
    """What the microbatches of a step skip, as one rank was given it.

    Attributes:
        skipped: for each microbatch, the virtual stages.
    """

    skipped: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class LossShare:
    """A rank's part of the losses of a step; a rank that computes none shares that at once.

    Attributes:
        refused: calls on this rank whose arguments were refused, so far.
        training_step: its number on this rank, which random numbers depend on.
        losses: by microbatch, on the rank that computes them; empty elsewhere.
        loss: their weighted combination there; None elsewhere.
        weight: the sum of their weights there; 0 elsewhere.
        loss_scale: the factor of this rank's GradScaler; None without one.
        has_weights: see `check_weights`.
    """

    refused: int = 0
    training_step: int = 0
    losses: Mapping[int, float] = field(default_factory=dict)
    loss: float | None = None
    weight: float = 0.0
    loss_scale: float | None = None
    has_weights: bool | None = None


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a step.

    Attributes:
        loss: over all replicas; None where none was computed.
        by_microbatch: of this rank's replica, in microbatch order.
    """

    loss: float | None
    by_microbatch: tuple[float, ...]

    @classmethod
    def of(cls, shares: Sequence[LossShare], topology: Topology, reduction: Reduction) -> Losses:
        """Combine the shares of all ranks, by rank, for the one at ``topology``."""
        leaders = [replace(topology, stage=stage, member=0).rank for stage in range(topology.stages)]
        losses = {m: loss for rank in leaders for m, loss in shares[rank].losses.items()}
        return cls(_shared_loss(shares, topology, reduction), tuple(losses[m] for m in sorted(losses)))


def _shared_loss(shares: Sequence[LossShare], topology: Topology, reduction: Reduction) -> float | None:
    """The loss over all replicas, added in their order; nan where all weights of an evaluation are 0."""
    leaders = (share for rank, share in enumerate(shares) if topology.place_of(rank).member == 0)
    parts = [(share.loss, share.weight) for share in leaders if share.loss is not None]
    if len(parts) < 2:
        return parts[0][0] if parts else None
    if reduction == "sum":
        return sum(loss for loss, _ in parts)
    total = sum(weight for _, weight in parts)
    return sum(loss * weight for loss, weight in parts if weight) / total if total else math.nan
