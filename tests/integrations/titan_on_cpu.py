"""torchtitan 0.3.0 on a CPU: import this before any part of it.

It needs things that torch 2.13's build for CPUs and the lock file do not have. What stands in for them here has their
names, and fails if it is used, but for the device's memory statistics, which are empty:

- Triton, for kernels of expert parallelism;
- ``datasets`` and TensorBoard, where they are not installed: the tests load no dataset, and log nowhere;
- ``torch.distributed.set_timeout``, which torch 2.13 has under another name;
- the module of the device: torchtitan takes a machine without an accelerator for one with CUDA.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout


class StandIn(ModuleType):
    """A module all of whose names are classes that cannot be made."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*args: object, **kwargs: object) -> NoReturn:
            raise AssertionError(f"{self.__name__}.{name} is not there on this machine")

        return type(name, (), {"__init__": refuse})


class Processor:
    """A CPU, as torchtitan asks for a device."""

    def set_device(self, device: object) -> None: ...

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_device_name(self, device: object) -> str:
        return "cpu"

    def get_device_properties(self, device: object) -> Any:
        return SimpleNamespace(total_memory=2**34)

    def memory_stats(self, device: object) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...

    def synchronize(self) -> None: ...


def is_there(name: str) -> bool:
    return find_spec(name) is not None


def prepare() -> None:
    kernels = "torchtitan.distributed.minimal_async_ep.kernels"
    absent = [] if is_there("triton") else [kernels]
    absent += [] if is_there("datasets") else ["datasets", "datasets.distributed"]
    absent += [] if is_there("tensorboard") else ["torch.utils.tensorboard"]
    sys.modules.update({name: StandIn(name) for name in absent})
    if not hasattr(dist, "set_timeout"):
        vars(dist)["set_timeout"] = _set_pg_timeout
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", Processor()


prepare()
