"""Which device a rank computes on: the option's, or that of its modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rrfp.compute.cuda_graphs import check_no_cuda_graphs
from rrfp.compute.devices.base import Device
from rrfp.compute.devices.cuda import CudaDevice
from rrfp.errors import ConfigError


def choose_device(modules: Mapping[int, nn.Module], option: Device | torch.device | str | None) -> Device | None:
    """The device on which ``modules`` compute; None for the CPU.

    Raises:
        ConfigError: if the modules lie on several devices, on another one than ``option``, or on one of a type that
            RRFP does not drive; or if there is no such device.
    """
    if isinstance(option, Device):
        return option
    wanted = None if option is None else torch.device(option)
    named = _devices(modules)
    for device, name in named.items():
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"{name} is on {device}, must be on one of: cpu, cuda")
    on_cuda = {device: name for device, name in named.items() if device.type == "cuda"}
    if len(on_cuda) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in on_cuda.items())
        raise ConfigError(f"a rank computes on one device, but its modules lie on several: {places}")
    if wanted is None:
        wanted = next(iter(on_cuda), torch.device("cpu"))
    for device, name in on_cuda.items():
        if device.type != wanted.type or wanted.index not in (None, device.index):
            raise ConfigError(f"device is {str(wanted)!r}, but {name} is on {device}; move it, or leave device out")
        wanted = device
    if wanted.type == "cpu":
        return None
    return _cuda(wanted)


def check_on_device(modules: Mapping[int, nn.Module], loss_fn: Any, device: Device | None) -> None:
    """Refuse modules, or a loss, that cannot run on ``device``.

    Raises:
        ConfigError: naming it.
    """
    if device is not None and device.kind == "cuda":
        check_no_cuda_graphs(modules, loss_fn)


def generator_devices(device: Device | None) -> tuple[torch.device, ...]:
    """The devices, beside the CPU, from whose random generators tasks on ``device`` may draw."""
    return (torch.device(device.name),) if device is not None and device.kind == "cuda" else ()


def _cuda(device: torch.device) -> Device:
    if device.type != "cuda":
        raise ConfigError(f"device is {str(device)!r}, must be one of: cpu, cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index: int | None = device.index  # torch's stub has no None
    if not count or (index is not None and index >= count):
        raise ConfigError(f"device is {str(device)!r}, but torch finds {count} CUDA devices here")
    return CudaDevice(index)


def _devices(modules: Mapping[int, nn.Module]) -> dict[torch.device, str]:
    """The devices of all parameters and buffers, each with the name of one that lies there."""
    named: dict[torch.device, str] = {}
    for name, tensor in _tensors(modules):
        named.setdefault(tensor.device, name)
    return named


def _tensors(modules: Mapping[int, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for v, module in sorted(modules.items()):
        for name, parameter in module.named_parameters():
            yield f"parameter {name!r} of virtual stage {v}", parameter
        for name, buffer in module.named_buffers():
            yield f"buffer {name!r} of virtual stage {v}", buffer
