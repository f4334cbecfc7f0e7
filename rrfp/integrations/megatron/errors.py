"""RRFP's errors as Megatron's callers expect them: each is a RuntimeError too."""

from __future__ import annotations

from collections.abc import Sequence

from rrfp import ConfigError, PipelineAborted, RrfpError
from rrfp.errors import Origin

__all__ = ["MegatronConfigError", "MegatronPipelineAborted", "MegatronPipelineError", "as_runtime_error"]


class MegatronConfigError(ConfigError, RuntimeError):
    """A flag, an argument or an option that RRFP does not run under Megatron."""


class MegatronPipelineError(RrfpError, RuntimeError):
    """The pipeline could not be started, or not be used again."""


class MegatronPipelineAborted(PipelineAborted, RuntimeError):
    """The pipeline ended on every rank because one rank failed.

    Attributes:
        global_rank: the rank of ``torch.distributed`` that failed.
    """

    def __init__(self, origin: Origin, global_rank: int) -> None:
        super().__init__(origin)
        self.args = (origin, global_rank)
        self.global_rank = global_rank

    def __str__(self) -> str:
        return f"{super().__str__()} (global rank {self.global_rank})"


def as_runtime_error(error: RrfpError, ranks: Sequence[Sequence[int]] = ()) -> RrfpError:
    """``error`` as one that is a RuntimeError; ``ranks`` are those of ``torch.distributed`` by stage and member."""
    if isinstance(error, RuntimeError):
        return error
    if isinstance(error, PipelineAborted):
        origin, members = error.origin, len(ranks[0])
        member = 0 if origin.rank is None else origin.rank % members
        return MegatronPipelineAborted(origin, ranks[origin.stage][member])
    return MegatronConfigError(str(error)) if isinstance(error, ConfigError) else MegatronPipelineError(str(error))
