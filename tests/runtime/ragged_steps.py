"""A rank's program for the soak test: steps with microbatches of many lengths, and what the rank takes meanwhile."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from runtime.toys import WIDTH
from transports.shm_state import descriptors, mappings

import rrfp.transports.shm.slot_pool as slot_pool
from rrfp.pipeline.faces import BlockingPipeline

#: Free slots that a rank may keep here, in bytes: so little that the bound is met.
IDLE_BYTES = 1 << 20

MICROBATCHES = 3

#: Rows of a microbatch: tensors of 70 to 290 KB, of 17 sizes of slots.
FEWEST, MOST = 1500, 6000

LARGEST_BYTES = MOST * WIDTH * 8


@dataclass(frozen=True)
class Sample:
    """What a rank has after some steps: descriptors, slots, their bytes, and bytes of all other memory of its own."""

    steps: int
    descriptors: int
    slots: int
    slot_bytes: int
    other_bytes: int


def take(steps: int) -> Sample:
    gc.collect()
    sizes = mappings()
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    anonymous = next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))
    return Sample(steps, descriptors(), len(sizes), sum(sizes), 1024 * anonymous)


def ragged_steps(rank: int, pipe: BlockingPipeline, connection: Connection) -> list[Sample]:
    """Make as many steps as the test says; returns samples after a fifth, two fifths and so on."""
    slot_pool.IDLE_BYTES = IDLE_BYTES
    count = connection.recv()
    choices = random.Random(11)  # the same on all ranks
    rows = torch.randn(MOST, WIDTH, dtype=torch.float64)
    samples = []
    for number in range(1, count + 1):
        batch = [rows[: choices.randint(FEWEST, MOST)] for _ in range(MICROBATCHES)]
        pipe.step(batch, batch)
        if number % (count // 5) == 0:
            samples.append(take(number))
    return samples
