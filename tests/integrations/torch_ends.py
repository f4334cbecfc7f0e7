"""How a rank's script ends: ``torch_ends.py HOW``. The last line of its output is JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from integrations.torch_parts import Block, Rank, batch
from torch import Tensor

#: The limit on torch's exchanges, and the silence after which a peer is lost, in seconds.
INIT_S, PATIENCE_S = 1.5, 3.0


#: For how long a rank that raised stays, in seconds.
LINGER_S = 5.0


class Dies(Block):
    """On rank 1 its process is killed in the second training step."""

    calls = 0

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.calls += 1
        if self.calls == 8 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x, scale)


class FailsAtOnce(Block):
    """On rank 1 it raises where torch infers shapes."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if dist.get_rank() == 1:
            raise ValueError("enough")
        return super().forward(x, scale)


#: What the stages are made of, by how the script ends.
MODULES = {"killed": Dies, "raises": FailsAtOnce}


def report(**values: Any) -> None:
    sys.stdout.write(json.dumps({"rank": dist.get_rank(), **values}) + "\n")
    sys.stdout.flush()


@contextmanager
def reported() -> Iterator[None]:
    """An error is reported, and ends the process at once, as torch's threads may wait forever."""
    began = time.monotonic()
    try:
        yield
    except Exception as error:
        frames = [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]
        report(error=type(error).__name__, text=str(error), seconds=time.monotonic() - began, frames=frames)
        if isinstance(error, ValueError):
            time.sleep(LINGER_S)  # the other rank must not learn it from the end of this process
        os._exit(7)


def leave_the_other_waiting() -> None:
    if dist.get_rank() == 1:
        time.sleep(2 * INIT_S)
        os._exit(0)


def main() -> None:
    how, *rest = sys.argv[1:]
    if how in ("refused", "between") and not rest and os.environ["RANK"] == "1":
        # A forked process has no end of a program, with the handlers that run at it.
        path = os.pathsep.join(filter(None, sys.path))  # where the tests' modules are
        os.execve(sys.executable, [sys.executable, __file__, how, "executed"], {**os.environ, "PYTHONPATH": path})
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    # Under torchrun a rank that failed at no fault of its own waits until the process at fault has ended.
    os.environ.pop("TORCHELASTIC_RUN_ID", None)
    if how == "unbuilt":
        leave_the_other_waiting()
    with reported():
        rank = Rank(
            1,
            4,
            make=MODULES.get(how, Block),
            init_timeout=INIT_S if how in ("absent", "unbuilt") else 60,
            patience=PATIENCE_S,
        )
    if how == "absent":
        leave_the_other_waiting()
    if how == "refused" and dist.get_rank() == 1:
        rank.schedule.step()
    for _ in range(3):
        args, kwargs = rank.arguments(*batch(0, 8), [])
        with reported():
            rank.schedule.step(*args, **kwargs)
        if how == "between" and dist.get_rank() == 1:
            raise LookupError("of the script")
    report(threads=rank.error() >= 0)
    if how == "destroyed":
        dist.destroy_process_group()


main()
