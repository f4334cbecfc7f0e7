"""`rrfp doctor`: checks whether this machine can run the package, and lists missing parts."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rrfp.commands.command_line import Json, print_json
from rrfp.version import __version__

if TYPE_CHECKING:
    from rrfp.devices.base import Device


#: Long enough for the driver's version (NVML's own limit).
_VERSION_LENGTH = 80


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device."""

    #: The maker's.
    name: str
    #: Such as ``"9.0"``.
    capability: str
    #: Memory that no process uses.
    free_bytes: int
    total_bytes: int
    #: The indexes of the other devices whose memory it can access.
    peers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuReport:
    """CUDA devices and the software that drives them, as far as present."""

    torch: str
    #: The version of CUDA for which torch is built.
    torch_cuda: str | None
    driver: str | None
    #: The newest version of CUDA that the driver supports.
    driver_cuda: str | None
    #: The version of NCCL in torch.
    nccl: str | None
    visible_devices: str | None
    #: In the order of torch's indexes.
    gpus: tuple[Gpu, ...] = ()

    def missing(self) -> str:
        driver = "no driver found" if self.driver_cuda is None else f"{self._driver_text()} found"
        if self.torch_cuda is None:
            return f"no CUDA device: torch {self.torch} is built without CUDA ({driver})"
        variable = f", {self._variable_text()}" if self.visible_devices is not None else ""
        return f"no CUDA device: torch {self.torch} is built for CUDA {self.torch_cuda}, {driver}{variable}"

    def lines(self) -> dict[str, str]:
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
    """Look at the devices; free memory makes a context on each."""
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
            else f"by shared device memory within this host (cuda_ipc) where a trial at the start works, else {staging}"
        )
        lines["on cuda"] = f"StreamLane, depth {StreamLane(device).depth}; {transports}; tensors {way}"
    return lines


def sharing_obstacle(device: Device) -> str:
    """Why no other process can open memory of ``device``; empty if this one can share it."""
    if device.sharing is None:
        return "its memory cannot be shared between processes"
    try:
        with device.stream().issuing():
            device.sharing.allocate(_TRIED_BYTES).close(is_open_elsewhere=False)
    except Exception as error:  # a device may raise anything
        return " ".join(f"its memory cannot be shared ({type(error).__name__}: {error}".split())[:200] + ")"
    return ""


#: Streams of a rank that should not queue behind each other: of its tasks, of copies each way, of reductions, and two
#: for each of four edges over NCCL, as many again for libraries that tasks call.
_ENOUGH_CONNECTIONS = 32

#: CUDA's own default.
_USUAL_CONNECTIONS = 8


def costly_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """By a short name, settings of CUDA that slow a pipeline down."""
    connections = environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if connections is not None and not (connections.isdecimal() and int(connections) >= _USUAL_CONNECTIONS):
        text = (
            f"CUDA_DEVICE_MAX_CONNECTIONS is {connections!r}: streams that share a connection start their work in the "
            f"order of the host's calls, so copies and collectives wait behind tasks; unset it, or take "
            f"{_ENOUGH_CONNECTIONS}"
        )
        return {"connections": text}
    return {}


def _nccl_version() -> str | None:
    from torch import distributed

    if not (distributed.is_available() and distributed.is_nccl_available()):
        return None
    from torch.cuda import nccl

    return ".".join(str(part) for part in nccl.version())  # type: ignore[no-untyped-call]


def _driver_versions() -> tuple[str | None, str | None]:
    """The driver's version, and its newest CUDA, asked without a context."""
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


_NUM_ROUND_TRIPS = 100

#: Of device memory whose sharing is tried.
_TRIED_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one look."""

    #: Whether the part is there and works.
    ok: bool
    required: bool
    #: The version, or the fault.
    detail: str


def doctor(json: Json = False) -> None:
    """Look at versions, devices and sockets; exit code 1 if something needed is missing."""
    findings = {name: _examine(look, required) for name, (look, required) in _LOOKS.items()}
    gpus = _add_gpus(findings)
    ok = all(finding.ok or not finding.required for finding in findings.values())
    if json:
        checks = {name: asdict(finding) for name, finding in findings.items()}
        print_json({"ok": ok, "checks": checks, "gpus": None if gpus is None else asdict(gpus)})
    else:
        for name, finding in findings.items():
            mark = "ok  " if finding.ok else "FAIL" if finding.required else "-   "
            typer.echo(f"{mark} {name:<12} {finding.detail}")
        typer.echo("ready" if ok else "not ready: see FAIL above")
    if not ok:
        raise typer.Exit(1)


def _examine(look: Callable[[], str], required: bool) -> Finding:
    try:
        return Finding(True, required, look())
    except PackageNotFoundError as error:
        return Finding(False, required, f"not installed: pip install {error.name}")
    except Exception as error:  # a broken package may raise anything
        return Finding(False, required, _one_line(error))


def _add_gpus(findings: dict[str, Finding]) -> GpuReport | None:
    """Add what concerns accelerators, none required; returns the report."""
    try:
        report = gpu_report()
        lines = report.lines() if report.gpus else {}
        if not report.gpus:
            findings["cuda"] = Finding(False, False, report.missing())
        for name, line in (*lines.items(), *choices().items()):
            findings[name] = Finding(True, False, line)
        if report.gpus:
            for name, line in costly_settings(os.environ).items():
                findings[name] = Finding(False, False, line)
    except Exception as error:  # a broken driver or package may raise anything
        findings["cuda"] = Finding(False, False, _one_line(error))
        return None
    return report


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _python() -> str:
    return f"{platform.python_version()} ({sys.executable})"


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{usable} usable of {os.cpu_count()}"


def _package(name: str) -> Callable[[], str]:
    """A look at an installed package that can be imported."""

    def look() -> str:
        version = installed_version(name)
        import_module(name)
        return version

    return look


def _zmq() -> str:
    import zmq

    return f"{installed_version('pyzmq')} (libzmq {zmq.zmq_version()})"


def _round_trip(transport: str) -> Callable[[], str]:
    """Send tensors back and forth between two transports of a kind."""

    def look() -> str:
        import asyncio

        best_us = asyncio.run(_round_trip_s(transport)) * 1e6
        return f"round trip of a tensor takes {best_us:.0f} us over {transport} in one process"

    return look


def _auto() -> str:
    from rrfp.transports.auto import explain

    return explain()


def _collective() -> str:
    if _nccl_version() is None:
        raise RuntimeError("this torch was built without NCCL")
    return "experimental, only by name: between CUDA devices; not run on several of them"


async def _round_trip_s(transport: str) -> float:
    """The fastest of some round trips, in seconds."""
    import time

    import torch

    from rrfp.model.tasks import Kind, Mode, StepId, Task
    from rrfp.testing.transport_checks import PairOptions
    from rrfp.testing.transport_checks.pair import started_pair
    from rrfp.transports.base import Channel, Message, MessageKind

    step, task = StepId(0, Mode.TRAIN, 1), Task(Kind.F, 0, 0)
    message = Message(Channel.FORWARD, MessageKind.OUTPUT, step, task, (torch.arange(1024.0),))
    best = float("inf")
    async with started_pair(transport, PairOptions()) as pair:
        for _ in range(_NUM_ROUND_TRIPS):
            start = time.perf_counter()
            await pair.left.send(1, message)
            await pair.right.receive()
            await pair.right.send(0, message)
            received = await pair.left.receive()
            best = min(best, time.perf_counter() - start)
    tensor = received.tensors[0]
    if tensor is None or not torch.equal(tensor, torch.arange(1024.0)):
        raise RuntimeError("a tensor changed on the round trip")
    return best


def _torchrun() -> str:
    import_module("torch.distributed.run")
    script = Path(sys.executable).with_name("torchrun")
    return str(script) if script.exists() else f"{sys.executable} -m torch.distributed.run"


def _secret() -> str:
    from rrfp.transports.secret import Secret

    secret = Secret.from_environment(os.environ)
    if secret is None:
        return "none: tcp connections need one, or allow_insecure=True"
    return f"in {secret.origin}: tcp connections are authenticated and encrypted"


#: By name: the look, and whether the part is required.
_LOOKS: dict[str, tuple[Callable[[], str], bool]] = {
    "python": (_python, True),
    "platform": (platform.platform, True),
    "cores": (_cores, True),
    "rrfp": (lambda: __version__, True),
    "torch": (_package("torch"), True),
    "numpy": (_package("numpy"), True),
    "msgpack": (_package("msgpack"), True),
    "pyzmq": (_zmq, True),
    "zmq": (_round_trip("zmq"), True),
    "shm": (_round_trip("shm"), False),
    "auto": (_auto, True),
    "collective": (_collective, False),
    "torchrun": (_torchrun, True),
    "secret": (_secret, False),
    "uvloop": (_package("uvloop"), False),
    "matplotlib": (_package("matplotlib"), False),
}
