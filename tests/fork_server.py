"""Processes forked from one server that has imported torch, which takes an interpreter of its own five seconds.

Each test process has one server, started outside of tests: the guards would take it for something left behind. It ends
with its test process, however that ends. It has no threads, and what it forks shares nothing with the test process but
what the test passes on. What is about an interpreter's start or end needs a real one: see `under_torchrun`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from rrfp import timeouts

TESTS = Path(__file__).parent

#: Environment variable that marks what was forked by `run`.
_FORKED = "RRFP_TEST_FORKED"

#: What the server imports. The first backward of a process needs sympy, the first optimizer needs dynamo.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torch.fx.experimental.symbolic_shapes",
    "rrfp.checkpoint",
    "rrfp.pipeline.api",
    "rrfp.lab.device_double",
    "rrfp.lab.reference",
    "rrfp.transports.zmq.transport",
    "on_device",
    "runtime.processes",
    "frozen_heap",  # the last one
)


def context() -> ForkServerContext:
    """The way to start processes; starts the server, if none runs yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    resource_tracker.ensure_running()
    # The server searches its environment's path alone, and passes over in silence what it does not find there.
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)), OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """For every module whose tests fork processes: starts the server outside of them."""
    if _FORKED not in os.environ:  # else these tests run in a forked process, and fork none
        context()


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: its exit code, negative for a signal, and what it printed."""

    code: int | None
    output: str
    errors: str

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.output}\n{self.errors}"


def run(
    *command: str | Path,
    timeout_s: float = 50.0,
    cwd: Path | None = None,
    ranks: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> list[Ended]:
    """Run ``python command`` in forked processes; kills those that take too long.

    Args:
        command: a script's path, or "-m" and a module's name; then its arguments.
        timeout_s: for all.
        cwd: in which folder; by default in the present one.
        ranks: as torchrun does, on so many; by default one process without torchrun's variables.
        variables: of the environment, over those of this process.
    """
    words = [str(word) for word in command]
    if ranks is None:
        return _run_each(words, [{**os.environ, **(variables or {})}], timeout_s, cwd or Path.cwd())
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [_variables(rank, ranks, store.port) for rank in range(ranks)]
    environments = [{**os.environ, **(variables or {}), **place} for place in places]
    return _run_each(words, environments, timeout_s, cwd or Path.cwd())


def _run_each(
    command: list[str], environments: Sequence[Mapping[str, str]], timeout_s: float, cwd: Path
) -> list[Ended]:
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(number)) for number in range(len(environments))]
        processes = [
            context().Process(target=_run, args=(command, cwd, each, output))
            for each, output in zip(environments, outputs, strict=True)
        ]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            _kill(processes)
        return [
            Ended(process.exitcode, output.with_suffix(".1").read_text(), output.with_suffix(".2").read_text())
            for process, output in zip(processes, outputs, strict=True)
        ]


def printed(*command: str | Path, **how: Any) -> str:
    """What a command that must succeed prints; of several ranks, one after the other. Takes the options of `run`."""
    ended = run(*command, **how)
    assert [each.code for each in ended] == [0] * len(ended), "\n".join(map(str, ended))
    return "".join(each.output for each in ended)


def reports(script: str, *arguments: str, ranks: int, timeout_s: float) -> list[dict[str, Any]]:
    """Run ``script``, a path in the folder of tests, which must succeed, on so many ranks.

    Returns:
        The line of JSON that each rank prints, by rank.
    """
    output = printed(TESTS / script, *arguments, ranks=ranks, timeout_s=timeout_s)
    lines: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines()]
    assert [line["rank"] for line in lines] == list(range(ranks))
    return lines


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"forked-{port}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _run(command: list[str], cwd: Path, environment: Mapping[str, str], output: Path) -> None:
    timeouts.FAILED_PROCESS_GRACE_S = 0.1  # for a launcher that looks which process ends first: there is none
    timeouts.LAUNCHER_LOOKS_S = 0.0
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment, **{_FORKED: "1"})
    for descriptor in (1, 2):
        os.dup2(os.open(output.with_suffix(f".{descriptor}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    added = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [path for path in added if path not in sys.path]
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent.absolute()))
        runpy.run_path(command[0], run_name="__main__")


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join(10)
