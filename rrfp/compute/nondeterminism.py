"""What torch itself does not promise: settings under which the same operators may give other bits.

The runtime fixes the order of everything that it orders. What a kernel does inside is torch's, and depends on settings
that belong to the whole process, so they are reported and never changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import nn

from rrfp.log import get_logger

logger = get_logger(__name__)

#: Values of CUBLAS_WORKSPACE_CONFIG with which cuBLAS promises the same bits on every run.
_CUBLAS_FIXED = (":4096:8", ":16:8")


def device_types(modules: Iterable[nn.Module]) -> frozenset[str]:
    """The types of the devices that hold parameters or buffers, ``"cpu"`` where there are none."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return frozenset(tensor.device.type for tensor in tensors) or frozenset({"cpu"})


def not_promised(types: Iterable[str]) -> list[str]:
    """What may differ between runs, or between machines, under the settings in force on this thread.

    Args:
        types: device types that compute.

    Returns:
        One sentence each, with what would change it; empty if nothing is known.
    """
    found: list[str] = []
    for kind in sorted(types):
        found += {"cpu": _on_cpu, "cuda": _on_cuda}.get(kind, lambda kind=kind: _elsewhere(kind))()
    return found


def warn_of_torch(modules: Iterable[nn.Module]) -> None:
    """Log in one line what `not_promised` finds for ``modules``, if anything."""
    if found := not_promised(device_types(modules)):
        logger.warning("deterministic=True orders tasks; torch itself does not promise: %s", "; ".join(found))


def _on_cpu() -> list[str]:
    threads = torch.get_num_threads()
    if threads == 1:
        return []
    found = [
        f"the same bits with another number of threads than {threads}, here or in the reference (torch.set_num_threads,"
        " OMP_NUM_THREADS)"
    ]
    if not _is_strict():
        found.append(
            "the gradient of indexing with a tensor, which several threads add in any order "
            "(torch.use_deterministic_algorithms(True), or one thread)"
        )
    return found


def _on_cuda() -> list[str]:
    found = []
    if not _is_strict():
        found.append("CUDA kernels that add in any order (torch.use_deterministic_algorithms(True))")
    if torch.backends.cudnn.benchmark:  # each of the algorithms may be deterministic, and the choice is not
        found.append("cuDNN, which picks algorithms by a measurement (torch.backends.cudnn.benchmark = False)")
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _CUBLAS_FIXED:
        found.append(f"cuBLAS on several streams (CUBLAS_WORKSPACE_CONFIG={_CUBLAS_FIXED[0]})")
    return found


def _elsewhere(kind: str) -> list[str]:
    return [] if kind == "meta" else [f"anything on devices of type {kind}, of which nothing is known here"]


def _is_strict() -> bool:
    """Whether torch refuses operators without a deterministic implementation."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
