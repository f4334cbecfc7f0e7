"""Trains for long with batches of ever new shapes, and tells whether anything of a process grows.

    python benchmarks/soak/run.py [--minutes N] [--steps-per-sample N] [--quick] [--json]

Four processes on transport auto train on microbatches of 3 to 9,064 rows. Every 7th step is followed by an evaluation,
every 40th by a checkpoint, of which two are kept. Each sample is a row of the table, and has of each process:

- descriptors, threads, and MiB of shared memory in slots;
- private: MiB of memory that is not shared with other processes nor with files;
- in use and free: MiB of the allocator of C, which most of private is. Free bytes lie between others that are in use,
  and do not go back to the system: fragments. They grow with the variety of shapes, and not with what anyone holds;
- blocks: thousands of blocks of Python's own allocator, a measure of its objects.

A figure is flat if the largest of the last third exceeds that of the second third by no more than its tolerance. What
grows is named, and the program ends with 1 then. Free bytes of the allocator have no verdict, nor has private, which
contains them; instead "private but free" has one. MALLOC_ARENA_MAX=1 in the environment shows what arenas contribute.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]

import rrfp
from benchmarks.shared.options import parsed, parser_of
from rrfp import checkpoint

RANKS, WIDTH, MICROBATCHES = 4, 128, 4
FEWEST, MOST = 3, 9064
EVALUATE_EVERY, SAVE_EVERY = 7, 40
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process has after some steps; memory in MiB."""

    minutes: float
    steps: int
    descriptors: int
    threads: int
    slots: float
    private: float
    in_use: float
    free: float
    blocks: float

    @property
    def private_but_free(self) -> float:
        """Private memory that is not lying free in the allocator."""
        return self.private - self.free


#: By how much a figure may grow.
TOLERANCES = {"descriptors": 8, "threads": 0, "slots": 128, "private_but_free": 8, "in_use": 6, "blocks": 35}


class _MallInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "keepcost")
    )


def take(began: float, steps: int) -> Sample:
    """The figures of this process."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallInfo
    heap = mallinfo()
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    slots = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:rrfp-" in line:
            start, _, end = line.split()[0].partition("-")
            slots += int(end, 16) - int(start, 16)
    return Sample(
        (time.monotonic() - began) / 60,
        steps,
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        slots / MIB,
        next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:")) / 1024,
        (heap.used + heap.hblkhd) / MIB,
        heap.free / MIB,
        sys.getallocatedblocks() / 1000,
    )


def _train(rank: int, folder: str, minutes: float, every: int, samples: Connection) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-4)
    shapes, rows = random.Random(11), torch.randn(MOST, WIDTH)  # the same on all ranks
    began, steps = time.monotonic(), 0
    names = {f"stage{rank}": stage}
    pipeline = rrfp.Pipeline(stage, topology=rrfp.Topology(rank, RANKS), loss_fn=nn.functional.mse_loss)
    with pipeline.blocking() as pipe:
        goes_on = torch.ones(1)
        while goes_on.item():
            steps += 1
            batch = [rows[: shapes.randint(FEWEST, MOST)] for _ in range(MICROBATCHES)]
            pipe.step(batch, batch)
            optimizer.step()
            optimizer.zero_grad()
            if steps % EVALUATE_EVERY == 0:
                pipe.evaluate(batch, batch)
            if steps % SAVE_EVERY == 0:
                checkpoint.save(f"{folder}/checkpoints", names, optimizer, pipe=pipe, keep=2)
            if steps % every == 0:
                samples.send(take(began, steps))
                goes_on[0] = time.monotonic() - began < 60 * minutes
                dist.broadcast(goes_on, 0)
    dist.destroy_process_group()
    samples.close()


def growth(samples: Sequence[Sample], figure: str) -> float:
    """By how much the largest of the last third exceeds that of the second third."""
    values = [float(getattr(sample, figure)) for sample in samples]
    third = len(values) // 3
    return max(values[-third:]) - max(values[third:-third])


def verdict(samples: Sequence[Sequence[Sample]]) -> list[str]:
    """What grows, one line each, of the samples of each rank; empty: all is flat."""
    grown = [(figure, rank, growth(samples[rank], figure)) for figure in TOLERANCES for rank in range(len(samples))]
    return [
        f"{figure.replace('_', ' ')} of rank {rank} grows by {by:.1f}, beyond {TOLERANCES[figure]}"
        for figure, rank, by in grown
        if by > TOLERANCES[figure]
    ]


def _row(each: Sequence[Sample]) -> list[str]:
    figures = [field.name for field in fields(Sample)[2:]]
    cells = [" ".join(f"{getattr(sample, figure):.0f}" for sample in each) for figure in figures]
    return [f"{each[0].minutes:.1f}", str(each[0].steps), *cells]


def main() -> None:
    """Run from the command line; exits with 1 if anything grows."""
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--steps-per-sample", type=int, default=100)
    arguments = parsed(parser)
    minutes, every = (0.05, 2) if arguments.quick else (arguments.minutes, arguments.steps_per_sample)
    samples: list[list[Sample]] = [[] for _ in range(RANKS)]
    console = Console(width=200)
    table = Table("minutes", "steps", *(field.name for field in fields(Sample)[2:]))
    if not arguments.json:
        console.print("  ".join(str(column.header) for column in table.columns), highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        context = get_context("fork")
        ends = [context.Pipe(duplex=False) for _ in range(RANKS)]
        processes = [
            context.Process(target=_train, args=(rank, folder, minutes, every, there))
            for rank, (_, there) in enumerate(ends)
        ]
        for process in processes:
            process.start()
        for _, there in ends:
            there.close()
        try:
            while True:
                for rank, (here, _) in enumerate(ends):
                    samples[rank].append(here.recv())
                if not arguments.json:
                    row = _row([own[-1] for own in samples])
                    table.add_row(*row)
                    print("  ".join(row), flush=True)
        except EOFError:
            pass
        for process in processes:
            process.join()
    if any(codes := [process.exitcode for process in processes]):
        raise SystemExit(f"exit codes {codes}")
    grown = verdict(samples) if len(samples[0]) >= 3 else ["too few samples"]
    if arguments.json:
        print(json.dumps({"samples": [[asdict(sample) for sample in own] for own in samples], "grown": grown}))
    else:
        console.print(table)
        print("\n".join(grown) if grown else "flat from the first third on")
    raise SystemExit(bool(grown) and not arguments.quick)


if __name__ == "__main__":
    main()
