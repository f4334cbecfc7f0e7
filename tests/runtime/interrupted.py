"""Trains on a device double until Ctrl-C; run by `test_ctrl_c_on_a_device.py`.

Arguments: who (``local``; ``async``, the same under asyncio.run; or one of two ranks), the lane whose work is long
once, how long that takes in seconds, and a file where ranks meet. Prints a line when the long work begins, one when the
caller gets the interrupt, and one with the threads of the runtime and the number of sockets that are left.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import threading
import time
from contextlib import suppress

import torch
from runtime.toys import data, loss_fn, stages
from torch.distributed import FileStore  # type: ignore[attr-defined]

import rrfp
from rrfp.lab.device_double import DoubleDevice
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.transports.rendezvous import StoreRendezvous

#: How long the runtime's threads may take to end, once its caller has left it.
GRACE_S = 2.0

#: The long work comes after so much other work: in the third step, or later.
EARLIER = 100

BATCH = data(6)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class LongOnce:
    """Durations of work on the device, of which one on the lane ``name`` is ``seconds``."""

    def __init__(self, name: str, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self.has_begun = False

    def __call__(self, count: int) -> float:
        """Called on the thread that issues the work."""
        if self.has_begun or count < EARLIER or threading.current_thread().name != self._name:
            return 0.001
        self.has_begun = True
        say("the device is busy")
        return self._seconds


def main(who: str, lane: str, seconds: float, store: str) -> None:
    torch.set_num_threads(1)
    before, duration = num_sockets(), LongOnce(lane, seconds)
    device = DoubleDevice(duration)
    try:
        if who == "async":
            asyncio.run(train(device))
        else:
            with pipeline(who, device, store) as pipe:
                while True:
                    pipe.step(BATCH.inputs, BATCH.targets)
    finally:
        say("interrupted")
        is_stuck = duration.has_begun and seconds > GRACE_S
        stuck = {"rrfp-device-double", lane, f"{lane}-watcher"} if is_stuck else set()
        deadline = time.monotonic() + GRACE_S
        while (left := threads()) - stuck and time.monotonic() < deadline:
            time.sleep(0.01)
        say(f"left: {num_sockets() - before} sockets, {' '.join(sorted(left))}")


async def train(device: DoubleDevice) -> None:
    async with rrfp.local(stages(3), loss_fn=loss_fn, device=device) as pipe:
        while True:
            await pipe.step(BATCH.inputs, BATCH.targets)


def pipeline(who: str, device: DoubleDevice, store: str) -> BlockingPipeline:
    if who == "local":
        return rrfp.local(stages(3), loss_fn=loss_fn, device=device).blocking()
    place, rendezvous = rrfp.Topology(int(who), 2), StoreRendezvous(FileStore(store, 2), run_id="test")
    module = stages(2)[int(who)]
    return rrfp.Pipeline(module, topology=place, rendezvous=rendezvous, loss_fn=loss_fn, device=device).blocking()


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("rrfp-")}


def num_sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the folder itself
            count += stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode)
    return count


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4])
