"""Settings of torch under which two runs, or two machines, give other bits.

The runtime fixes the order of tasks and messages. The order inside a kernel is torch's, and depends on settings of the
whole process, so they are never changed. On a CPU they make a difference between machines and threads, and are
reported. On CUDA two runs of one program differ under them, so a pipeline that promises equal bits refuses to start.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

import torch
from torch import nn

from rrfp.errors import ConfigError
from rrfp.log import get_logger

logger = get_logger(__name__)

#: Values of CUBLAS_WORKSPACE_CONFIG for which cuBLAS promises the same bits in every run.
_CUBLAS_FIXED = (":4096:8", ":16:8")


def device_types(modules: Iterable[nn.Module]) -> frozenset[str]:
    """The types of devices with parameters or buffers; or ``"cpu"``."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return frozenset(tensor.device.type for tensor in tensors) or frozenset({"cpu"})


def not_promised(types: Iterable[str]) -> list[str]:
    """Differences between runs or machines, each with the setting that prevents it."""
    on_device = {"cpu": _on_cpu, "cuda": list[str], "meta": list[str]}
    unknown = "anything on devices of type {}, of which nothing is known here"
    return [
        clause
        for kind in sorted(types)
        for clause in (on_device[kind]() if kind in on_device else [unknown.format(kind)])
    ]


def check_torch(types: Collection[str]) -> None:
    """Refuse settings under which two runs differ; log `not_promised`."""
    if "cuda" in types and (missing := missing_on_cuda()):
        raise ConfigError(
            f"deterministic=True on CUDA needs {', and '.join(missing)}; set them before the first kernel"
        )
    if clauses := not_promised(types):
        logger.warning("deterministic=True orders tasks; torch itself does not promise: %s", "; ".join(clauses))


def missing_on_cuda() -> list[str]:
    """The settings that CUDA needs for the same bits, each with the reason."""
    missing, workspace = [], os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if not _is_strict():
        missing.append("torch.use_deterministic_algorithms(True), without warn_only: some kernels add in any order")
    if torch.backends.cudnn.benchmark:
        missing.append("torch.backends.cudnn.benchmark = False: a measurement picks among algorithms")
    if workspace not in _CUBLAS_FIXED:
        allowed = " or ".join(_CUBLAS_FIXED)
        missing.append(
            f"the environment variable CUBLAS_WORKSPACE_CONFIG, which is {workspace!r}, to be {allowed}: "
            "cuBLAS on several streams shares its workspace otherwise"
        )
    return missing


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


def _is_strict() -> bool:
    """Whether torch refuses operators without a deterministic implementation."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
