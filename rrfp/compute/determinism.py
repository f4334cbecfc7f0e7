"""Random numbers that depend on the task and never on its time, and settings of torch that give other bits.

Every task draws from generators seeded by (seed, training step, kind, virtual stage, microbatch), so dropout masks are
the same in any order of tasks, on any placement of the stages, after a resume with ``first_step``, with or without
evaluations between training steps, and in the one-process reference.

Why not give each task a generator? Dropout and similar operators take none: they draw from torch's CPU generator and
that of each CUDA device, which are global to the process. So a fork swaps the state of the *global* generators, and
holds a lock of the process until the caller's state is restored. Lanes in one process exclude one another; lanes in
processes of their own do not. A caller who draws random numbers in another thread while a step runs disturbs both
streams.

Why fork also around tasks that draw nothing? Whether a task draws is known only once it has drawn: a module may begin
at any microbatch, after ``train()``, in a branch on its data, or where a checkpoint recomputes. torch reports no draw,
and a task cannot run twice. So a fork is made cheap instead.

The runtime fixes the order of tasks and messages. The order inside a kernel is torch's, and depends on settings of the
whole process, so they are never changed. On a CPU they make a difference between machines and threads, and are
reported. On CUDA two runs of one program differ under them, so a pipeline that promises equal bits refuses to start.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from rrfp.compute.lanes.thread import lane_is_closed
from rrfp.errors import ConfigError
from rrfp.log import get_logger
from rrfp.model.tasks import Task

P = ParamSpec("P")
T = TypeVar("T")

#: Held while the process's generators belong to one task.
_generators_in_use = threading.Lock()


def replica_seed(seed: int, replica: int) -> int:
    """The seed of a replica: replicas have other microbatches, and need other dropout masks."""
    if replica == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{replica}".encode(), digest_size=8).digest(), "big") >> 1


def fork_seed(seed: int, step: int, task: Task) -> int:
    """The 64-bit seed of a task's generators, the same everywhere."""
    text = f"{seed}:{step}:{task.kind}:{task.virtual_stage}:{task.microbatch}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def devices_of(module: nn.Module) -> frozenset[torch.device]:
    """The CUDA devices that hold parameters or buffers of ``module``."""
    tensors = (*module.parameters(), *module.buffers())
    return frozenset(tensor.device for tensor in tensors if tensor.device.type == "cuda")


@dataclass(frozen=True, slots=True)
class RandomForks:
    """Forks of torch's generators for each task; not Python's and numpy's."""

    #: The run's seed; None disables forking and its lock.
    seed: int | None
    #: CUDA devices whose generators are forked along with the CPU's. One without an index is the current one of the
    #: thread that forks.
    devices: frozenset[torch.device] = frozenset()

    def run(self, step: int, task: Task, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` with the generators seeded for ``task``. Not reentrant."""
        # Why no context manager? One written as a generator takes as long as saving, seeding and restoring.
        if self.seed is None:
            return function(*args, **kwargs)
        seed = fork_seed(self.seed, step, task)
        with _generators_in_use:
            generators = [torch.default_generator]
            if self.devices:
                generators += _cuda_generators(self.devices)
            states = [generator.get_state() for generator in generators]
            try:
                for generator in generators:
                    generator.manual_seed(seed)
                return function(*args, **kwargs)
            finally:
                for generator, state in zip(generators, states, strict=True):
                    # After a failure the caller goes on while the last task still runs: a seed that it has set stays.
                    if generator.initial_seed() == seed or not lane_is_closed():
                        generator.set_state(state)


def _cuda_generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    indices: list[int | None] = [device.index for device in devices]  # torch's stub has no None
    return [torch.cuda.default_generators[torch.cuda.current_device() if i is None else i] for i in indices]


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
    if "cuda" in types and (missing := missing_on_cuda(CudaSettings.here())):
        raise ConfigError(
            f"deterministic=True on CUDA needs {', and '.join(missing)}; set them before the first kernel"
        )
    if clauses := not_promised(types):
        logger.warning("deterministic=True orders tasks; torch itself does not promise: %s", "; ".join(clauses))


@dataclass(frozen=True, slots=True)
class CudaSettings:
    """What decides whether CUDA kernels give the same bits in each run."""

    #: Whether torch refuses operators without a deterministic implementation.
    is_strict: bool
    #: Whether cuDNN picks algorithms by a measurement.
    measures: bool
    #: The variable CUBLAS_WORKSPACE_CONFIG.
    workspace: str | None

    @classmethod
    def here(cls) -> CudaSettings:
        """Those of this process."""
        return cls(_is_strict(), torch.backends.cudnn.benchmark, os.environ.get("CUBLAS_WORKSPACE_CONFIG"))


def missing_on_cuda(settings: CudaSettings) -> list[str]:
    """The settings that CUDA needs for the same bits, each with the reason."""
    missing = []
    if not settings.is_strict:
        missing.append("torch.use_deterministic_algorithms(True), without warn_only: some kernels add in any order")
    if settings.measures:
        missing.append("torch.backends.cudnn.benchmark = False: a measurement picks among algorithms")
    if settings.workspace not in _CUBLAS_FIXED:
        allowed = " or ".join(_CUBLAS_FIXED)
        missing.append(
            f"the environment variable CUBLAS_WORKSPACE_CONFIG, which is {settings.workspace!r}, to be {allowed}: "
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
