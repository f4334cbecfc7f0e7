"""Megatron-core 0.16 on a CPU: import this before a model is built.

Megatron computes on CUDA devices alone. What stands in for them here does what its name says, on the CPU: tensors are
made there, streams are in order anyway, and every draw comes from torch's one generator, so that dropout differs from
that of a GPU. With RRFP it has nothing to do: Megatron's own schedules need the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import torch_norm
from megatron.core.transformer.moe import moe_utils

CPU = torch.device("cpu")

#: What makes tensors, by its name in torch; Megatron passes ``device="cuda"`` or a device's number.
FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros", "zeros_like")


class Stream:
    """A stream of a device that has one only."""

    device = CPU

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> Stream:
        return self  # which is synchronized as an event is

    def synchronize(self) -> None: ...


class OneGenerator:
    """Megatron's tracker of a GPU's generators: draws from torch's."""

    @contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield

    def get_states(self) -> dict[str, Any]:
        return {}

    def set_states(self, states: object) -> None: ...

    def add(self, name: str, seed: int) -> None: ...

    def is_initialized(self) -> bool:
        return True


def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """``make`` with a CUDA device taken for the CPU."""

    def made(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
            kwargs["device"] = CPU
        return make(*args, **kwargs)

    return made


def replace(home: Any, **others: Any) -> None:
    """Replace attributes."""
    for name, other in others.items():
        setattr(home, name, other)


def prepare_torch() -> None:
    """What Megatron asks torch for."""
    replace(torch, **{name: on_cpu(getattr(torch, name)) for name in FACTORIES})
    replace(torch.cuda, current_device=lambda: CPU, synchronize=lambda *of: None, get_rng_state=torch.get_rng_state)
    replace(torch.cuda, Stream=Stream, current_stream=lambda *of: Stream(), stream=lambda stream: nullcontext())
    replace(torch.cuda.nvtx, range_push=lambda text: 0, range_pop=lambda: 0)
    name_of_type = torch.Tensor.type

    def cuda_type(self: Any, *args: Any, **kwargs: Any) -> Any:  # DistributedDataParallel looks for torch.cuda.*Tensor
        found: Any = name_of_type(self, *args, **kwargs)
        return found if args or kwargs else found.replace("torch.", "torch.cuda.")

    replace(torch.Tensor, cuda=lambda self, *args, **kwargs: self, type=cuda_type)
    exchange = dist.all_to_all_single

    def all_to_all(output: Any, input: Any, *splits: Any, **kwargs: Any) -> Any:  # gloo takes lists, not tensors
        for name in ("output_split_sizes", "input_split_sizes"):
            if kwargs.get(name) is not None:
                kwargs[name] = [int(size) for size in kwargs[name]]
        listed: list[Any] = [sizes if sizes is None else [int(size) for size in sizes] for sizes in splits]
        return exchange(output, input, *listed, **kwargs)

    replace(dist, all_to_all_single=all_to_all)


def prepare_megatron() -> None:
    """What Megatron lacks without CUDA and TransformerEngine."""
    tracker, own = OneGenerator(), megatron_random.get_cuda_rng_tracker
    for module in list(sys.modules.values()):
        if getattr(module, "get_cuda_rng_tracker", None) is own:
            replace(module, get_cuda_rng_tracker=lambda *args, **kwargs: tracker)
    replace(megatron_random, _get_cuda_rng_state=lambda *args, **kwargs: torch.get_rng_state())
    replace(megatron_random, _set_cuda_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state))
    if not hasattr(moe_utils, "te_general_gemm"):  # which routing looks for, with TransformerEngine or without
        replace(moe_utils, te_general_gemm=None)
    make = torch_norm.WrappedTorchNorm.__new__

    def norm(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        """A norm of torch that marks its parameters for sequence parallelism, as TransformerEngine's do."""
        parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            made = make(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = parallel
        for parameter in made.parameters():
            parameter.sequence_parallel = parallel
        return made

    replace(torch_norm.WrappedTorchNorm, __new__=norm)


prepare_torch()
prepare_megatron()
