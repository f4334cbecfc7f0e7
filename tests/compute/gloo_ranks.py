"""Runs functions on a few real processes with a gloo group over them all."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from fork_server import context
from on_device import on_double_if_asked

#: What is run on each rank: an assertion that fails, or any other error, is the outcome.
Case = Callable[[int], None]

#: What a rank says of a case that went well.
GOOD = "as expected"


def cases_of(module: object) -> list[str]:
    """The names of the cases in ``module``: its public functions that take a rank."""
    functions = inspect.getmembers(module, inspect.isfunction)
    return [name for name, case in functions if list(inspect.signature(case).parameters) == ["rank"]]


def outcomes(module: str, cases: list[str], count: int, folder: Path, timeout_s: float = 50.0) -> dict[str, list[str]]:
    """Run all cases, one after the other, on ``count`` ranks, which see torchrun's RANK and WORLD_SIZE.

    Returns:
        By case what each rank says of it.
    """
    forked = context()
    connections, processes = [], []
    for rank in range(count):
        here, there = forked.Pipe()
        arguments = (module, cases, rank, count, str(folder / "store"), there)
        process = forked.Process(target=_run, args=arguments, name=f"gloo-{rank}")
        process.start()
        there.close()
        connections.append(here)
        processes.append(process)
    try:
        outcomes = [connection.recv() if connection.poll(timeout_s) else {} for connection in connections]
        for connection in connections:
            connection.close()
        for process in processes:
            process.join(10)
        ended = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    assert ended == [0] * count
    return {case: [each.get(case, "not run") for each in outcomes] for case in cases}


def _run(module: str, cases: list[str], rank: int, count: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    functions = vars(__import__(module, fromlist=["cases"]))
    outcomes = {}
    for case in cases:
        try:
            with on_double_if_asked(builds_ranks=module.startswith("runtime.")):
                functions[case](rank)
            outcomes[case] = GOOD
        except BaseException:
            outcomes[case] = traceback.format_exc()
            break  # the others may wait for this rank
    connection.send(outcomes)
    connection.poll(60)  # until all have answered: a rank that exits breaks the groups that others still connect
    connection.close()
