"""What the ranks of a step tell each other must fit together; the first rank that differs is named on all of them."""

from __future__ import annotations

from collections.abc import Sequence

from rrfp.core.topology import Topology
from rrfp.errors import ProtocolError


def check_numbers(numbers: Sequence[int], topology: Topology) -> None:
    """Ranks that draw for different training steps have loaded different states."""
    if len(set(numbers)) > 1:
        other = next(rank for rank, number in enumerate(numbers) if number != numbers[0])
        raise ProtocolError(
            f"the training step is {numbers[0]} on {topology.name_of(0)} and {numbers[other]} on "
            f"{topology.name_of(other)}: must be the same; load the state of one step on all ranks"
        )


def check_scales(scales: Sequence[float | None], topology: Topology) -> None:
    """The last stage's scale is in all gradients, and every rank divides its own by its scale."""
    if len(set(scales)) > 1:
        other = next(rank for rank, scale in enumerate(scales) if scale != scales[0])
        first, second = ("absent" if scale is None else f"{scale:g}" for scale in (scales[0], scales[other]))
        raise ProtocolError(
            f"the scale of the loss is {first} on {topology.name_of(0)} and {second} on "
            f"{topology.name_of(other)}: must be the same; call scale() with a GradScaler of the same "
            "arguments and state, enabled on all ranks or on none"
        )


def check_weights(have_weights: Sequence[bool | None], topology: Topology) -> None:
    """Weights that another rank of a replica has do nothing where the losses are computed without them.

    Args:
        have_weights: by rank, whether it has weights; None on a rank without, where they are of no use.
        topology: of any rank.
    """
    having = {topology.place_of(rank).replica: rank for rank, has in enumerate(have_weights) if has}
    for rank, has in enumerate(have_weights) if having else ():
        if has is False and (other := having.get(topology.place_of(rank).replica)) is not None:
            raise ProtocolError(
                f"weights is passed on {topology.name_of(other)} and not on {topology.name_of(rank)}, which computes "
                "the losses: must be passed there"
            )


def check_equal_weights(weights: Sequence[Sequence[float]], topology: Topology) -> None:
    """Losses of several parts are added by microbatch, so a microbatch has one weight.

    Args:
        weights: by rank, of its microbatches; empty on a rank that computes no losses.
        topology: of any rank. Replicas have microbatches of their own.
    """
    first: dict[int, int] = {}
    for rank, own in enumerate(weights):
        if not own or own == weights[other := first.setdefault(topology.place_of(rank).replica, rank)]:
            continue
        m = next(m for m, (here, there) in enumerate(zip(own, weights[other], strict=True)) if here != there)
        raise ProtocolError(
            f"weights[{m}] is {weights[other][m]:g} on {topology.name_of(other)} and {own[m]:g} on "
            f"{topology.name_of(rank)}: must be the same on all ranks of a replica that compute losses"
        )


def check_visits(skipped: Sequence[Sequence[Sequence[int]]], parts: Sequence[str], topology: Topology) -> None:
    """A rank would wait in vain for a task that another one skips.

    Args:
        skipped: by rank and microbatch, the virtual stages that it skips.
        parts: by virtual stage, its part.
        topology: of any rank. Replicas have microbatches of their own.
    """
    first: dict[int, int] = {}
    for rank, own in enumerate(skipped):
        other = first.setdefault(topology.place_of(rank).replica, rank)
        count = max(len(own), len(skipped[other]))
        for m, (here, there) in enumerate(zip(_whole(own, count), _whole(skipped[other], count), strict=False)):
            if here != there:
                part = parts[min(set(here) ^ set(there))]
                does, does_not = (rank, other) if min(set(here) ^ set(there)) in here else (other, rank)
                raise ProtocolError(
                    f"visits: microbatch {m} skips {part!r} on {topology.name_of(does)} and not on "
                    f"{topology.name_of(does_not)}: must be the same on all ranks of a replica"
                )


def _whole(skipped: Sequence[Sequence[int]], count: int) -> Sequence[Sequence[int]]:
    return skipped or [()] * count
