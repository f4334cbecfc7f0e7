"""Settings of torch under which the same operators may give other bits.

The runtime fixes the order of tasks and messages. The order inside a kernel is torch's, and depends on settings of the
whole process, so they are reported and never changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import nn

from rrfp.log import get_logger

logger = get_logger(__name__)

#: Values of CUBLAS_WORKSPACE_CONFIG for which cuBLAS promises the same bits in every run.
_CUBLAS_FIXED = (":4096:8", ":16:8")


def device_types(modules: Iterable[nn.Module]) -> frozenset[str]:
    """The types of the devices that hold parameters or buffers; ``"cpu"`` if there are none."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return frozenset(tensor.device.type for tensor in tensors) or frozenset({"cpu"})


def not_promised(types: Iterable[str]) -> list[str]:
    """Differences between runs or machines that this thread's settings allow, each with the setting that prevents it.

    Empty if none is known for the device ``types`` that compute.
    """
    on_device = {"cpu": _on_cpu, "cuda": _on_cuda, "meta": list[str]}
    unknown = "anything on devices of type {}, of which nothing is known here"
    return [
        clause
        for kind in sorted(types)
        for clause in (on_device[kind]() if kind in on_device else [unknown.format(kind)])
    ]


def warn_of_torch(modules: Iterable[nn.Module]) -> None:
    """Log the clauses of `not_promised` for ``modules``, if any, in one line."""
    if clauses := not_promised(device_types(modules)):
        logger.warning("deterministic=True orders tasks; torch itself does not promise: %s", "; ".join(clauses))


def _on_cpu() -> list[str]:
    threads = torch.get_num_threads()
    if threads == 1:
        return []
    clauses = [
        f"the same bits with another number of threads than {threads}, here or in the reference (torch.set_num_threads,"
        " OMP_NUM_THREADS)"
    ]
    if not _is_strict():
        clauses.append(
            "the gradient of indexing with a tensor, which several threads add in any order "
            "(torch.use_deterministic_algorithms(True), or one thread)"
        )
    return clauses


def _on_cuda() -> list[str]:
    clauses = []
    if not _is_strict():
        clauses.append("CUDA kernels that add in any order (torch.use_deterministic_algorithms(True))")
    if torch.backends.cudnn.benchmark:  # each of the algorithms may be deterministic, and the choice is not
        clauses.append("cuDNN, which picks algorithms by a measurement (torch.backends.cudnn.benchmark = False)")
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _CUBLAS_FIXED:
        clauses.append(f"cuBLAS on several streams (CUBLAS_WORKSPACE_CONFIG={_CUBLAS_FIXED[0]})")
    return clauses


def _is_strict() -> bool:
    """Whether torch refuses operators without a deterministic implementation."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
