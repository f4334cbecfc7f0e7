"""One call of ``clip_grad_norm_``: what this rank tells all others, and what follows from what they tell."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgpack
from torch import Tensor, nn

from rrfp.compute.gradients.norm import check_norm, clip, combined_norm, local_norm
from rrfp.core.topology import Topology
from rrfp.errors import ConfigError, ProtocolError


@dataclass(frozen=True, slots=True)
class GradientHolder:
    """The gradients of this process.

    Attributes:
        modules: that have them, by virtual stage.
        place: where this rank is; None where the process has all stages.
        ranks: the layout's ranks in ``torch.distributed``; by default with the same numbers.
        skip: parameters that count on another rank.
    """

    modules: Mapping[int, nn.Module]
    place: Topology | None = None
    ranks: Sequence[int] | None = None
    skip: Collection[Tensor] = ()


class Clipping:
    """Clips the gradients of all ranks by their common norm. Made and settled on the caller's thread.

    Args:
        holder: this rank's gradients.
        max_norm: the norm they may have.
        norm_type: p of the p-norm.

    Raises:
        ConfigError: if an argument is impossible, or the program of this rank has no modules.
        StageError: if a gradient has a layout whose norm cannot be formed.
    """

    def __init__(self, holder: GradientHolder, max_norm: float, norm_type: float = 2.0) -> None:
        check_norm(max_norm, norm_type)
        if not holder.modules:
            raise ConfigError("clip_grad_norm_ needs modules: the gradients of a StageProgram are its own to clip")
        self._holder = holder
        self._terms = (float(max_norm), float(norm_type))
        self._own = local_norm(holder.modules, norm_type, topology=holder.place, ranks=holder.ranks, skip=holder.skip)

    def told(self) -> bytes:
        """What this rank gives."""
        packed: bytes = msgpack.packb((*self._terms, self._own))
        return packed

    def nothing(self) -> bytes:
        """What further ranks of this process give."""
        packed: bytes = msgpack.packb((*self._terms, 0.0))
        return packed

    def settle(self, answers: Sequence[bytes]) -> float:
        """Scale this process's gradients by what all ranks gave.

        Returns:
            The norm before, the same on all ranks.

        Raises:
            ConfigError: if the ranks did not ask for the same.
            ProtocolError: if an answer cannot be read.
        """
        given = [_read(data) for data in answers]
        terms = sorted({(max_norm, norm_type) for max_norm, norm_type, _ in given})
        if len(terms) > 1:
            told = " and ".join(f"({max_norm:g}, {norm_type:g})" for max_norm, norm_type in terms)
            raise ConfigError(f"max_norm and norm_type are {told} on different ranks, must be the same on all")
        max_norm, norm_type = self._terms
        norm = combined_norm([own for _, _, own in given], norm_type)
        clip(self._holder.modules, max_norm, norm)
        return norm


def _read(data: bytes) -> tuple[float, float, float]:
    try:
        max_norm, norm_type, own = msgpack.unpackb(data)
        return float(max_norm), float(norm_type), float(own)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a share of the gradient norm cannot be read: {error}") from None
