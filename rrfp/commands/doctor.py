"""`rrfp doctor`: checks whether this machine can run the package, and lists missing parts."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

import typer

from rrfp.commands.gpus import GpuReport, choices, gpu_report
from rrfp.commands.output import Json, print_json
from rrfp.version import __version__

_NUM_ROUND_TRIPS = 100


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one look.

    Attributes:
        ok: whether the part is there and works.
        required: whether RRFP needs it to run.
        detail: the version, or the fault.
    """

    ok: bool
    required: bool
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
    """Add what concerns accelerators, none of which is required; returns the report if the look itself works."""
    try:
        report = gpu_report()
        lines = report.lines() if report.gpus else {}
        if not report.gpus:
            findings["cuda"] = Finding(False, False, report.missing())
        for name, line in (*lines.items(), *choices().items()):
            findings[name] = Finding(True, False, line)
    except Exception as error:  # a broken driver or package may raise anything
        findings["cuda"] = Finding(False, False, _one_line(error))
        return None
    return report


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _python() -> str:
    return f"{platform.python_version()} ({sys.executable})"


def _platform() -> str:
    return platform.platform()


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
    from torch import distributed

    if not (distributed.is_available() and distributed.is_gloo_available()):
        raise RuntimeError("this torch was built without gloo")
    nccl = "NCCL between GPUs was not run on several of them" if distributed.is_nccl_available() else "no NCCL"
    return f"experimental, only by name; {_round_trip('collective')()} with gloo; {nccl}"


async def _round_trip_s(transport: str) -> float:
    """The fastest of some round trips, in seconds."""
    import time

    import torch

    from rrfp.commands.pair import started_pair
    from rrfp.core.tasks import Kind, Mode, StepId, Task
    from rrfp.testing.transport_checks import PairOptions
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


#: By name: the look, and whether the part is required.
def _secret() -> str:
    from rrfp.transports.secret import Secret

    secret = Secret.from_environment(os.environ)
    if secret is None:
        return "none: tcp connections need one, or allow_insecure=True"
    return f"in {secret.origin}: tcp connections are authenticated and encrypted"


_LOOKS: dict[str, tuple[Callable[[], str], bool]] = {
    "python": (_python, True),
    "platform": (_platform, True),
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
