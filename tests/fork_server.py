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
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

TESTS = Path(__file__).parent

#: What the server imports. The first backward of a process needs sympy, the first optimizer needs dynamo.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.fx.experimental.symbolic_shapes",
    "rrfp.pipeline.api",
    "rrfp.testing.device_double",
    "rrfp.testing.reference",
    "rrfp.transports.zmq.transport",
    "on_device",
    "runtime.processes",
)


def context() -> ForkServerContext:
    """The way to start processes; starts the server, if none runs yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    resource_tracker.ensure_running()
    # The server searches its environment's path alone, and passes over in silence what it does not find there.
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        forkserver.ensure_running()
    return context


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """For every module whose tests fork processes: starts the server outside of them."""
    context()


def reports(script: str, *arguments: str, ranks: int, timeout_s: float) -> list[dict[str, Any]]:
    """Run ``script``, a path in the folder of tests, on so many ranks, with torchrun's variables.

    Returns:
        The line of JSON that each rank prints, by rank. The script must succeed.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    deadline = time.monotonic() + timeout_s
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            variables = _variables(rank, ranks, store.port)
            rest = (str(TESTS / script), arguments, variables, f"{folder}/{rank}")
            processes.append(context().Process(target=_run, args=rest, name=f"rank-{rank}"))
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            _kill(processes)
        printed = [Path(folder, str(rank)).read_text() for rank in range(ranks)]
    ended = [process.exitcode for process in processes]
    assert ended == [0] * ranks, "\n".join([f"exit codes {ended}", *printed])
    lines = [json.loads(text) for text in printed]
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


def _run(script: str, arguments: tuple[str, ...], variables: Mapping[str, str], output: str) -> None:
    os.environ |= variables
    for descriptor in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join(10)
