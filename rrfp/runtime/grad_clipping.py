"""One call of ``clip_grad_norm_``: the share of this rank in the common norm, and the scale that follows from all.

Nothing here knows lanes. The step before is complete on the device, not only issued, so the caller's thread may use the
gradients on any stream; and the next step's fence orders it behind the scaling.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from rrfp.compute.gradients.norm import check_norm, clip, combined_norm, local_norm
from rrfp.core.topology import Topology
from rrfp.errors import ConfigError
from rrfp.graphs.names import TextOf, numbered
from rrfp.runtime import records


@dataclass(frozen=True, slots=True)
class GradientHolder:
    """The gradients of this process.

    Attributes:
        modules: that have them, by virtual stage.
        topology: where this rank is; None where the process has all stages.
        ranks: the layout's ranks in ``torch.distributed``; by default with the same numbers.
        skip: parameters that count on another rank.
        text_of: names virtual stages in errors.
    """

    modules: Mapping[int, nn.Module]
    topology: Topology | None = None
    ranks: Sequence[int] | None = None
    skip: Collection[Tensor] = ()
    text_of: TextOf = numbered


@dataclass(frozen=True, slots=True)
class NormShare:
    """A rank's part of the common norm of all gradients.

    Attributes:
        max_norm: the norm that its caller allows.
        norm_type: p of the p-norm.
        norm: of its own gradients.
    """

    max_norm: float
    norm_type: float
    norm: float


class Clipping:
    """Clips the gradients of all ranks by their common norm. All methods are called on the caller's thread.

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
        self._own = local_norm(
            holder.modules,
            norm_type,
            topology=holder.topology,
            ranks=holder.ranks,
            skip=holder.skip,
            text_of=holder.text_of,
        )

    def share(self) -> bytes:
        """This rank's part of the norm."""
        return records.pack(NormShare(*self._terms, self._own))

    def empty_share(self) -> bytes:
        """The part of further ranks of this process: the first has the gradients of all."""
        return records.pack(NormShare(*self._terms, 0.0))

    def clip(self, gathered: Sequence[bytes]) -> float:
        """Scale this process's gradients, given the shares of all ranks; returns the norm before, the same on all.

        Raises:
            ConfigError: if the ranks did not ask for the same.
            ProtocolError: if a share cannot be read.
        """
        shares = [records.unpack(NormShare, data, "a share of the gradient norm") for data in gathered]
        terms = sorted({(share.max_norm, share.norm_type) for share in shares})
        if len(terms) > 1:
            values = " and ".join(f"({max_norm:g}, {norm_type:g})" for max_norm, norm_type in terms)
            raise ConfigError(f"max_norm and norm_type are {values} on different ranks, must be the same on all")
        max_norm, norm_type = self._terms
        norm = combined_norm([share.norm for share in shares], norm_type)
        clip(self._holder.modules, max_norm, norm)
        return norm
