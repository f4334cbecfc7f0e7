"""Random numbers that depend on what is computed, never on when.

Every task draws from generators seeded by (seed, training step, kind, virtual stage, microbatch), so dropout masks are
the same in any order of tasks, on any placement of the stages, after a resume with ``first_step``, with or without
evaluations between training steps, and in the one-process reference.

torch's CPU generator, and each CUDA device's, is one object for the whole process. A fork therefore swaps the state of
the *global* generators, and one lock, shared by every stage of the process, is held from the swap until the caller's
state is back. Lanes that live in one process take turns; lanes in processes of their own never meet. A caller who draws
random numbers in another thread while a step runs would disturb both streams: torch offers no way to keep them apart.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from rrfp.core.tasks import Task

#: Held while the process's generators belong to one task.
_generators_in_use = threading.Lock()


def replica_seed(seed: int, replica: int) -> int:
    """The seed of a replica's run: its microbatches are other data, so their dropout masks are others too."""
    if replica == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{replica}".encode(), digest_size=8).digest(), "big") >> 1


def fork_seed(seed: int, step: int, task: Task) -> int:
    """The 64-bit seed of a task's generators: a fixed hash, the same in every process, version and platform."""
    text = f"{seed}:{step}:{task.kind}:{task.virtual_stage}:{task.microbatch}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def devices_of(module: nn.Module) -> frozenset[torch.device]:
    """The CUDA devices that hold parameters or buffers of ``module``."""
    tensors = (*module.parameters(), *module.buffers())
    return frozenset(tensor.device for tensor in tensors if tensor.device.type == "cuda")


@dataclass(frozen=True, slots=True)
class RandomForks:
    """Forks of torch's global generators, one for each task.

    Python's and numpy's generators are left alone.

    Attributes:
        seed: the run's seed; None turns forking, and the lock that it needs, off.
        devices: CUDA devices whose generators are forked along with the CPU's.
    """

    seed: int | None
    devices: frozenset[torch.device] = frozenset()

    @contextmanager
    def fork(self, step: int, task: Task) -> Iterator[None]:
        """Give the global generators to ``task`` of ``step``; afterwards they are as they were before. Not reentrant.

        Args:
            step: the number of the training step.
            task: what is going to run.
        """
        if self.seed is None:
            yield
            return
        seed = fork_seed(self.seed, step, task)
        with _generators_in_use:
            generators = [torch.default_generator, *_cuda_generators(self.devices)]
            states = [generator.get_state() for generator in generators]
            try:
                for generator in generators:
                    generator.manual_seed(seed)
                yield
            finally:
                for generator, state in zip(generators, states, strict=True):
                    generator.set_state(state)


def _cuda_generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    return [torch.cuda.default_generators[device.index] for device in devices]
