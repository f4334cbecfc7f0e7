"""The device of tests and benchmarks for GPUs: CUDA, or on a CPU a stand-in.

Those are the double (``--device double``), which looks for races, and the stub (``--device stub``), over which torch's
own CUDA code runs in the environment of tests/gpu/stub.
"""

from __future__ import annotations

import datetime
import importlib.util
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import rrfp
from rrfp.commands.doctor import gpu_report
from rrfp.devices.base import Device
from rrfp.devices.cuda import CudaDevice
from rrfp.errors import ConfigError
from rrfp.lab.device_double import DoubleDevice

#: Values of ``--device``.
DEVICES = ("cuda", "stub", "double")

#: How long the double takes for a piece of work.
DOUBLE_S = 0.0003


@dataclass(frozen=True)
class Target:
    """A device.

    Attributes:
        name: one of `DEVICES`.
        where: the place of modules and batches.
        device: the device behind it.
    """

    name: str
    where: torch.device
    device: Device

    @property
    def is_cuda(self) -> bool:
        """Whether it is torch's CUDA device: over a GPU, or over the stub."""
        return self.name != "double"

    @property
    def options(self) -> dict[str, Any]:
        """Options of a pipeline whose modules lie there; on CUDA they decide themselves."""
        return {} if self.is_cuda else {"device": self.device}

    def synchronize(self) -> None:
        """Wait for all that was issued."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def take_problems(self) -> list[str]:
        """The races that the double has seen since the last call; none on CUDA, which does not look for them."""
        if not isinstance(self.device, DoubleDevice):
            return []
        problems = self.device.problems[:]
        del self.device.problems[: len(problems)]
        return problems


@contextmanager
def open_target(name: str, double_s: float = DOUBLE_S) -> Iterator[Target]:
    """The device called ``name``; the double takes ``double_s`` seconds for a piece of work."""
    if name == "stub" and importlib.util.find_spec("cuda_stub") is None:
        raise ConfigError("device is 'stub', and this Python has none: `make gpu-test DEVICE=stub` sets one up")
    if name != "double":
        yield Target(name, torch.device("cuda", 0), CudaDevice(0))
    else:
        with DoubleDevice(double_s) as device:
            yield Target(name, torch.device("cpu"), device)


def header(device: str) -> list[str]:
    """The machine, the versions and the date, as lines of a file of results."""
    report = gpu_report()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    lines = [f"{now}; RRFP {_commit()}, Python {platform.python_version()}, torch {report.torch}"]
    lines += [f"{name}: {line}" for name, line in report.lines().items()] if report.gpus else [report.missing()]
    if device != "cuda":
        lines.append(f"device: the {device}, on the CPU: times and speeds mean nothing")
    return lines


def _commit() -> str:
    with suppress(OSError):  # there may be no git
        command = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return f"{rrfp.__version__} of unknown commit"
