"""Which device a rank computes on, the option's or that of its modules; and the lanes in front of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from rrfp.compute.lanes.base import Lane
from rrfp.compute.lanes.stream import StreamLane
from rrfp.compute.lanes.thread import ThreadLane
from rrfp.devices.base import Device
from rrfp.devices.cuda import CudaDevice
from rrfp.errors import ConfigError
from rrfp.log import get_logger
from rrfp.model.graph import TextOf, numbered
from rrfp.plugins import made

# Names of torch that are not documented. Where a version of torch lacks one, nothing is found by it.
_CONFIG_OF = "get_compiler_config"
_COMPILED_CALL = "_compiled_call_impl"
_CONTEXT = "dynamo_ctx"
_BACKEND_OF = "_torchdynamo_orig_backend"
_USES_GRAPHS = "triton.cudagraphs"
_GRAPHS_BACKEND = "cudagraphs"

_PROBLEM = (
    "compiled for CUDA graphs (mode='reduce-overhead' or 'max-autotune', or the option 'triton.cudagraphs'), whose "
    "memory the next forward overwrites before this one's backward: compile with mode='default' or "
    "'max-autotune-no-cudagraphs'"
)


def check_no_cuda_graphs(
    modules: Mapping[int, nn.Module], losses: Iterable[Any] = (), text_of: TextOf = numbered
) -> None:
    """Refuse modules, by virtual stage, and losses that would run as CUDA graphs on a device."""
    if any(map(_uses_graphs, losses)):
        raise ConfigError(f"loss_fn is {_PROBLEM}")
    for v, module in sorted(modules.items()):
        for name, submodule in module.named_modules():
            if any(map(_uses_graphs, _compiled(submodule))):
                where = f"in its submodule {name!r}" if name else "as a whole"
                raise ConfigError(f"the module of {text_of(v)}, {where}, is {_PROBLEM}")


def _compiled(module: nn.Module) -> Iterator[Any]:
    """The objects of ``module`` that `torch.compile` may have made: itself, its calls in place, and its forward."""
    yield module
    yield getattr(module, _COMPILED_CALL, None)
    yield getattr(module, "forward", None)


def _uses_graphs(compiled: Any) -> bool:
    config_of = getattr(compiled, _CONFIG_OF, None)
    config = config_of() if callable(config_of) else None
    if isinstance(config, Mapping):
        return bool(config.get(_USES_GRAPHS))
    backend = getattr(getattr(compiled, _CONTEXT, None), "callback", None)
    while (inner := getattr(backend, _BACKEND_OF, None)) is not None:
        backend = inner
    return getattr(backend, "compiler_name", None) == _GRAPHS_BACKEND


logger = get_logger(__name__)

#: The types of devices that RRFP drives by itself.
_TYPES = "cpu, cuda"


def choose_device(
    modules: Mapping[int, nn.Module], option: Device | torch.device | str | None, text_of: TextOf = numbered
) -> Device | None:
    """The device on which ``modules``, by virtual stage, compute; None for the CPU.

    Parameters and buffers on the CPU go with any device: some may stay there, or be moved in each forward.
    """
    named = {device: name for device, name in _devices(modules, text_of).items() if device.type != "cpu"}
    if isinstance(option, Device):
        for name, tensor in _tensors(modules, text_of):
            if tensor.device.type != "cpu" and not option.holds(tensor):
                raise ConfigError(f"device is {option.name!r}, but {name} is on {tensor.device}; move it")
        return option
    for device, name in named.items():
        if device.type != "cuda":
            raise ConfigError(f"{name} is on {device}, must be on one of: {_TYPES}; or pass a Device as device=")
    if len(named) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in named.items())
        raise ConfigError(f"a rank computes on one device, but its modules lie on several: {places}")
    wanted = next(iter(named), torch.device("cpu")) if option is None else torch.device(option)
    for device, name in named.items():
        if device.type != wanted.type or wanted.index not in (None, device.index):
            raise ConfigError(f"device is {str(wanted)!r}, but {name} is on {device}; move it, or leave device out")
        wanted = device
    if wanted.type == "cpu":
        return None
    chosen = _cuda(wanted)
    if not named and any(True for module in modules.values() for _ in module.parameters()):
        logger.warning(
            "device is %r, but all parameters are on the CPU, and nothing moves them: unless the modules do that "
            "themselves, move the modules first (module.to(%r))",
            chosen.name,
            chosen.name,
        )
    return chosen


def check_on_device(
    modules: Mapping[int, nn.Module], losses: Mapping[int, Any], device: Device | None, text_of: TextOf = numbered
) -> None:
    if device is not None and device.kind == "cuda":
        check_no_cuda_graphs(modules, losses.values(), text_of)


def new_lane(device: Device | None, name: str, nice: int = 0, *, is_timed: bool = True) -> Lane:
    """A lane on a stream of ``device``; on a thread where that is None."""
    return ThreadLane(name, nice=nice) if device is None else StreamLane(device, name, nice=nice, is_timed=is_timed)


def stage_lane(stage: int, device: Device | None, make_lane: Callable[[int], Lane] | None, nice: int) -> Lane:
    """The lane of ``stage``, which computes on ``device``; the caller's own, if that computes there too."""
    if make_lane is None:
        return new_lane(device, f"rrfp-lane-{stage}", nice)
    lane = made(Lane, "lane", make_lane, stage)  # type: ignore[type-abstract]
    if device is not None and (lane.device is None or lane.device.name != device.name):
        where = "on the CPU" if lane.device is None else f"on {lane.device.name}"
        raise ConfigError(
            f"lane({stage}) computes {where}, but the stage is on {device.name}: return a StreamLane of that device, "
            "or leave lane out"
        )
    return lane


def generator_devices(device: Device | None) -> tuple[torch.device, ...]:
    """The devices, beside the CPU, from whose random generators tasks on ``device`` may draw."""
    return (torch.device(device.name),) if device is not None and device.kind == "cuda" else ()


def _cuda(device: torch.device) -> Device:
    if device.type != "cuda":
        raise ConfigError(f"device is {str(device)!r}, must be one of: {_TYPES}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index: int | None = device.index  # torch's stub has no None
    if not count or (index is not None and index >= count):
        raise ConfigError(f"device is {str(device)!r}, but torch finds {count} CUDA devices here")
    return _cuda_device(torch.cuda.current_device() if index is None else index)


@cache
def _cuda_device(index: int) -> CudaDevice:
    """One object for all ranks of this process on a device: they share its pool of events."""
    return CudaDevice(index)


def _devices(modules: Mapping[int, nn.Module], text_of: TextOf) -> dict[torch.device, str]:
    """The devices of all parameters and buffers, each with the name of one that lies there."""
    named: dict[torch.device, str] = {}
    for name, tensor in _tensors(modules, text_of):
        named.setdefault(tensor.device, name)
    return named


def _tensors(modules: Mapping[int, nn.Module], text_of: TextOf) -> Iterator[tuple[str, torch.Tensor]]:
    for v, module in sorted(modules.items()):
        for name, parameter in module.named_parameters():
            yield f"parameter {name!r} of {text_of(v)}", parameter
        for name, buffer in module.named_buffers():
            yield f"buffer {name!r} of {text_of(v)}", buffer
