"""Modules that write their buffers in forward, such as running statistics: their result depends on the order of Fs."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from rrfp.compute.loss_module import class_name
from rrfp.errors import StageError


def writes_buffers_in_forward(module: nn.Module) -> bool:
    """Whether a submodule is known to: BatchNorm and its kin while they track statistics."""
    return any(isinstance(one, _NormBase) and one.track_running_stats for one in module.modules())


class BufferWatch:
    """Finds out whether a forward wrote a buffer.

    Args:
        module: the module.
        virtual_stage: its index, for messages.
    """

    def __init__(self, module: nn.Module, virtual_stage: int) -> None:
        self._module = module
        self._virtual_stage = virtual_stage
        self._versions = self._read()

    def _read(self) -> dict[str, int]:
        return {name: buffer._version for name, buffer in self._module.named_buffers()}

    def check(self) -> None:
        """Call after a forward whose place among the others is not fixed.

        Raises:
            StageError: naming the buffer that was written.
        """
        for name, version in self._read().items():
            if self._versions.get(name) != version:
                where = f"{class_name(self._module)} on virtual stage {self._virtual_stage}"
                raise StageError(
                    f"{where} writes its buffer {name!r} in forward, so its result depends on the order of "
                    "microbatches: deterministic=True cannot run it"
                )
