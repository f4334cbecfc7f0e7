"""Ranks that meet over a real store to which another program writes, and ranks that refuse to start."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from runtime.children import Children, End
from runtime.toys import data, loss_fn, stages
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.testing._internal.distributed.fake_pg import FakeStore

import rrfp
from rrfp.transports.rendezvous import StoreRendezvous

RUN = "job"

#: What the first pipeline of each rank publishes under.
SETTINGS, ENTERED, FAILED = f"settings/{RUN}/0/0/", f"entered/{RUN}/0/", f"failed/{RUN}/0/0"


def connect(port: int) -> Any:
    """A client of the store, as any program has one that reaches the port."""
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))


def foreign(port: int) -> Any:
    """The store with the keys of the job, for a program that is none of its ranks."""
    return PrefixStore(f"rrfp/{RUN}/0", connect(port))


class Ranks(Children):
    """Ranks over a store that this process hosts, started one by one by the test."""

    def __init__(self, count: int, **options: Any) -> None:
        super().__init__()
        self._count = count
        self._options = options
        self._host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port: int = self._host.port

    def go(self, rank: int, variables: Mapping[str, str] | None = None, **options: Any) -> None:
        """Start a rank, whose number must be the next one of `Children`."""
        settings = {**self._options, **options}
        self.start(f"rank-{rank}", _run, self.port, rank, self._count, variables or {}, settings)


def _run(
    port: int, rank: int, count: int, variables: Mapping[str, str], options: dict[str, Any], connection: Connection
) -> None:
    torch.set_num_threads(1)
    os.environ.update(variables)
    batch, steps, goes_on = data(3), options.pop("steps", 2), options.pop("goes_on", False)
    if "WRAPPED" in os.environ:
        options["loss_fn"] = wrapped_loss()

    def train() -> Any:
        pipeline = rrfp.Pipeline(
            stages(count)[rank],
            topology=rrfp.Topology(rank, count, RUN),
            rendezvous=StoreRendezvous(connect(port), run_id=RUN),
            **{"loss_fn": loss_fn, **options},
        )
        with pipeline.blocking() as pipe:
            connection.send("started")
            losses = [pipe.step(batch.inputs, batch.targets).loss]
            if steps > 1:
                connection.recv()
                losses += [pipe.step(batch.inputs, batch.targets).loss for _ in range(steps - 1)]
            return losses

    end = End.of(train)
    connection.send(end)
    if goes_on:
        connection.recv()
    connection.close()


def wrapped_loss() -> nn.Module:
    """A loss of which a part is in DistributedDataParallel."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return nn.ModuleDict({"head": nn.parallel.DistributedDataParallel(nn.Linear(2, 2))})


class Fragile(rrfp.Hint):
    """A hint that cannot be made where a variable says so."""

    def __init__(self) -> None:
        if "FRAGILE" in os.environ:
            raise OSError("its file is missing")

    def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task:
        return next(iter(ready))


def forge(port: int, keys: list[str], value: bytes, awaited: list[str], user: int, connection: Connection) -> None:
    """As another user: once the ``awaited`` keys are there, write ``value`` under all ``keys``; empty: delete them."""
    if os.geteuid() == 0:
        os.setuid(user)
    store = foreign(port)
    while awaited and not store.check(awaited):
        time.sleep(0.01)
    for key in keys:
        if value:
            store.set(key, value)
        else:
            store.delete_key(key)
    connection.send("forged")
    connection.close()
