"""One call of ``clip_grad_norm_``: the share of this rank in the common norm, and the scale that follows from all.

Nothing here knows lanes. The step before is complete on the device, not only issued, so the caller's thread may use the
gradients on any stream; and the next step's fence orders it behind the scaling.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from rrfp.compute.gradients.norm import check_norm, clip, combined_norm, local_norm
from rrfp.errors import ConfigError
from rrfp.model.graph import TextOf, numbered
from rrfp.model.topology import Topology
from rrfp.runtime import records


@dataclass(frozen=True, slots=True)
class GradientHolder:
    """The gradients of this process."""

    #: Modules with gradients, by virtual stage.
    modules: Mapping[int, nn.Module]
    #: Where this rank is; None where the process has all stages.
    topology: Topology | None = None
    #: The layout's ranks in ``torch.distributed``; by default with the same numbers.
    ranks: Sequence[int] | None = None
    #: Parameters that count on another rank.
    skip: Collection[Tensor] = ()
    text_of: TextOf = numbered


@dataclass(frozen=True, slots=True)
class NormShare:
    """A rank's part of the common norm of all gradients."""

    max_norm: float
    #: p of the p-norm.
    norm_type: float
    #: Whether a common norm that is inf or nan is an error.
    error_if_nonfinite: bool
    #: The norm of this rank's own gradients.
    norm: float


class Clipping:
    """Clips the gradients of all ranks by their common norm. All methods are called on the caller's thread."""

    def __init__(
        self,
        holder: GradientHolder,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> None:
        check_norm(max_norm, norm_type, error_if_nonfinite, foreach)
        if not holder.modules:
            raise ConfigError("clip_grad_norm_ needs modules: the gradients of a StageProgram are its own to clip")
        self._holder = holder
        self._terms = (float(max_norm), float(norm_type), error_if_nonfinite)
        self._own = local_norm(
            holder.modules,
            float(norm_type),
            topology=holder.topology,
            ranks=holder.ranks,
            skip=holder.skip,
            text_of=holder.text_of,
        )

    def share(self) -> bytes:
        return records.pack(NormShare(*self._terms, self._own))

    def empty_share(self) -> bytes:
        """The part of further ranks of this process: the first has the gradients of all."""
        return records.pack(NormShare(*self._terms, 0.0))

    def clip(self, gathered: Sequence[bytes]) -> float:
        """Scale this process's gradients, given the shares of all ranks; returns the norm before, the same on all."""
        shares = [records.unpack(NormShare, data, "a share of the gradient norm") for data in gathered]
        terms = sorted({(share.max_norm, share.norm_type, share.error_if_nonfinite) for share in shares})
        if len(terms) > 1:
            values = " and ".join(f"({max_norm:g}, {norm_type:g}, {strict})" for max_norm, norm_type, strict in terms)
            raise ConfigError(
                f"max_norm, norm_type and error_if_nonfinite are {values} on different ranks, must be the same on all"
            )
        max_norm, norm_type, error_if_nonfinite = self._terms
        norm = combined_norm([share.norm for share in shares], norm_type)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"the norm of order {norm_type:g} of all gradients is {norm}, must be finite, as error_if_nonfinite is "
                "True: no gradient was clipped"
            )
        clip(self._holder.modules, max_norm, norm)
        return norm


def any_overflow(gathered: Sequence[bytes]) -> bool:
    """Whether a rank has an overflow; a ProtocolError if a share cannot be read."""
    shares = [records.unpack(bool, data, "a share of the overflows") for data in gathered]
    return any(shares)
