"""The accelerators that torch finds here, and the lane and the transport that a module on each device gets."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rrfp.compute.devices.base import Device

#: Long enough for the driver's version (NVML's own limit).
_VERSION_LENGTH = 80


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device.

    Attributes:
        name: the maker's.
        capability: such as ``"9.0"``.
        free_bytes: memory that no process uses.
        total_bytes: all of its memory.
        peers: the indexes of the other devices whose memory it can access.
    """

    name: str
    capability: str
    free_bytes: int
    total_bytes: int
    peers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuReport:
    """The CUDA devices and the software that drives them. A version is None where that part is absent.

    Attributes:
        torch: torch's version.
        torch_cuda: the version of CUDA for which torch is built.
        driver: the driver's version.
        driver_cuda: the newest version of CUDA that the driver supports.
        nccl: the version of NCCL in torch.
        visible_devices: the variable CUDA_VISIBLE_DEVICES.
        gpus: in the order of torch's indexes.
    """

    torch: str
    torch_cuda: str | None
    driver: str | None
    driver_cuda: str | None
    nccl: str | None
    visible_devices: str | None
    gpus: tuple[Gpu, ...] = ()

    def missing(self) -> str:
        """The reason why there is no device."""
        driver = "no driver found" if self.driver_cuda is None else f"{self._driver_text()} found"
        if self.torch_cuda is None:
            return f"no CUDA device: torch {self.torch} is built without CUDA ({driver})"
        variable = f", {self._variable_text()}" if self.visible_devices is not None else ""
        return f"no CUDA device: torch {self.torch} is built for CUDA {self.torch_cuda}, {driver}{variable}"

    def lines(self) -> dict[str, str]:
        """For each device a line by its name; before them one of the versions."""
        count = len(self.gpus)
        lines = {
            "cuda": f"{count} device{'s' * (count > 1)}; torch is built for CUDA {self.torch_cuda}, "
            f"{self._driver_text()}, NCCL {self.nccl or 'not in torch'}, {self._variable_text()}"
        }
        for index, gpu in enumerate(self.gpus):
            memory = f"{gpu.free_bytes / 2**30:.1f} of {gpu.total_bytes / 2**30:.1f} GiB free"
            line = f"{gpu.name}, capability {gpu.capability}, {memory}"
            if count > 1:
                line += f", peer access to {', '.join(map(str, gpu.peers)) or 'none'}"
            lines[f"cuda:{index}"] = line
        return lines

    def _driver_text(self) -> str:
        return f"driver {self.driver or 'of unknown version'} for CUDA up to {self.driver_cuda or 'unknown'}"

    def _variable_text(self) -> str:
        if self.visible_devices is None:
            return "CUDA_VISIBLE_DEVICES not set"
        return f"CUDA_VISIBLE_DEVICES is {self.visible_devices!r}"


def gpu_report() -> GpuReport:
    """Look at the devices of this machine; asking for free memory makes a CUDA context on each."""
    import torch

    driver, driver_cuda = _driver_versions()
    indexes = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    gpus = []
    for index in indexes:
        major, minor = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        peers = tuple(o for o in indexes if o != index and torch.cuda.can_device_access_peer(index, o))
        gpus.append(Gpu(torch.cuda.get_device_name(index), f"{major}.{minor}", free, total, peers))
    return GpuReport(
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        driver=driver,
        driver_cuda=driver_cuda,
        nccl=_nccl_version(),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        gpus=tuple(gpus),
    )


def choices() -> Mapping[str, str]:
    """For each kind of device, the lane and the transports that a module on it gets by default."""
    import torch

    from rrfp.compute.lanes.stream import StreamLane
    from rrfp.compute.lanes.thread import ThreadLane
    from rrfp.pipeline.device_choice import choose_device
    from rrfp.pipeline.options import option_table

    transports = f"transport {option_table()['transport'].default}, in rrfp.local inproc"
    lines = {"on cpu": f"ThreadLane, depth {ThreadLane.depth}; {transports}"}
    if torch.cuda.is_available() and (device := choose_device({}, "cuda")) is not None:
        staging = "through pinned host memory"
        obstacle = sharing_obstacle(device)
        way = (
            f"{staging}, since {obstacle}"
            if obstacle
            else f"pulled within this host (cuda_ipc) where a trial at the start works, else {staging}"
        )
        lines["on cuda"] = f"StreamLane, depth {StreamLane(device).depth}; {transports}; tensors {way}"
    return lines


def sharing_obstacle(device: Device) -> str:
    """Why no other process can open memory of ``device``; empty if this one can share it."""
    import torch

    if device.sharing is None:
        return "its memory cannot be shared between processes"
    try:
        with (stream := device.stream()).issuing():
            shared = device.sharing.share(device.empty(torch.empty(1 << 10, dtype=torch.uint8, device="meta")))
        stream.record().synchronize()
        del shared
    except Exception as error:  # a device may raise anything
        return " ".join(f"its memory cannot be shared ({type(error).__name__}: {error}".split())[:200] + ")"
    return ""


def _nccl_version() -> str | None:
    from torch import distributed

    if not (distributed.is_available() and distributed.is_nccl_available()):
        return None
    from torch.cuda import nccl

    return ".".join(str(part) for part in nccl.version())  # type: ignore[no-untyped-call]


def _driver_versions() -> tuple[str | None, str | None]:
    """The driver's version, and the newest CUDA that it supports; asked of its own libraries, without a context."""
    driver = driver_cuda = None
    number = ctypes.c_int()
    text = ctypes.create_string_buffer(_VERSION_LENGTH)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0:
            driver_cuda = f"{number.value // 1000}.{number.value % 1000 // 10}"
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            if nvml.nvmlSystemGetDriverVersion(text, _VERSION_LENGTH) == 0:
                driver = text.value.decode()
            nvml.nvmlShutdown()
    except (AttributeError, OSError):
        pass  # a library is absent: the versions stay unknown
    return driver, driver_cuda
