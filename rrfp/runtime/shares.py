"""What each rank shares with all others in a step, and the losses that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from rrfp.compute.weighting import Reduction, combine_losses
from rrfp.core.topology import Topology


@dataclass(frozen=True, slots=True)
class WeightShare:
    """A rank's part of the weights of a step.

    Attributes:
        weight: the sum of the weights of its replica's microbatches, on one rank of a replica; 0 on the others.
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
class PartLosses:
    """The losses of one part in a step.

    Attributes:
        by_microbatch: of those microbatches that visit it.
        loss: their weighted combination.
    """

    by_microbatch: Mapping[int, float]
    loss: float


@dataclass(frozen=True, slots=True)
class LossShare:
    """A rank's part of the losses of a step; a rank that computes none shares that at once.

    Attributes:
        refused: calls on this rank whose arguments were refused, so far.
        training_step: its number on this rank, which random numbers depend on.
        parts: the losses that the rank computes by part, "" where the model has one loss; empty elsewhere.
        weight: the sum of the weights of all microbatches there; 0 elsewhere.
        loss_scale: the factor of this rank's GradScaler; None without one.
        has_weights: see `check_weights`.
        weights: of the microbatches, where several parts have losses and this rank computes any.
    """

    refused: int = 0
    training_step: int = 0
    parts: Mapping[str, PartLosses] = field(default_factory=dict)
    weight: float = 0.0
    loss_scale: float | None = None
    has_weights: bool | None = None
    weights: tuple[float, ...] = ()


def part_losses(
    losses: Mapping[str, Mapping[int, float]],
    microbatches: int,
    weights: Sequence[float] | None,
    reduction: Reduction,
    *,
    is_part: bool,
) -> dict[str, PartLosses]:
    """The losses that a rank computes, by part and microbatch, for its share; a skipped loss adds nothing to a mean.

    Args:
        losses: a part without any is left out.
        microbatches: M.
        weights: of the microbatches.
        reduction: how they combine.
        is_part: whether the rank's replica has microbatches that count; the combinations are 0 otherwise.
    """
    return {
        part: PartLosses(
            own,
            combine_losses([own.get(m, 0.0) for m in range(microbatches)], weights, reduction) if is_part else 0.0,
        )
        for part, own in losses.items()
        if own
    }


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a step.

    Attributes:
        loss: over all replicas; None where none was computed.
        by_microbatch: of this rank's replica, in microbatch order.
        by_part: over all replicas, in the order of parts; empty where the model has one loss.
    """

    loss: float | None
    by_microbatch: tuple[float, ...]
    by_part: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        shares: Sequence[LossShare],
        topology: Topology,
        microbatches: int,
        reduction: Reduction,
        parts: Sequence[str] = (),
    ) -> Self:
        """Combine the shares of all ranks, by rank, for the one at ``topology``; ``parts`` have losses of their own."""
        ranks = [rank for rank, share in enumerate(shares) if share.parts and topology.place_of(rank).member == 0]
        leaders = [(topology.place_of(rank).replica, shares[rank]) for rank in ranks]
        weights = {replica: share.weight for replica, share in leaders}
        names = [part for part in parts or ("",) if any(part in share.parts for _, share in leaders)]
        by_part = {
            part: _shared_loss({r: s.parts[part].loss for r, s in leaders if part in s.parts}, weights, reduction)
            for part in names
        }
        mine = [share.parts for replica, share in leaders if replica == topology.replica]
        own = [each[part].by_microbatch for part in names for each in mine if part in each]
        by_microbatch = tuple(_sum(each[m] for each in own if m in each) for m in range(microbatches)) if own else ()
        loss = _sum(by_part.values()) if by_part else None
        return cls(loss, by_microbatch, by_part if parts else {})


def _shared_loss(losses: Mapping[int, float], weights: Mapping[int, float], reduction: Reduction) -> float:
    """A loss over all replicas, added in their order; nan where all weights of an evaluation are 0.

    Args:
        losses: by replica; one whose microbatches all skip the part has none.
        weights: by replica, the sum over its microbatches.
        reduction: how losses combine.
    """
    if len(weights) == 1:
        return next(iter(losses.values()))
    if reduction == "sum":
        return sum(losses.values())
    total = sum(weights.values())
    return sum(loss * weights[r] for r, loss in losses.items() if weights[r]) / total if total else math.nan


def _sum(values: Iterable[float]) -> float:
    """0 without values; one value as it is, to the last bit."""
    first, *further = (*values,) or (0.0,)
    return sum(further, first)
