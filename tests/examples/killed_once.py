"""The training example, in which a rank is killed in each attempt that the first argument names; ranks print losses.

The first argument is JSON, ``{"kills": [[rank, "task" or "write", count], ...], "save": "async" or "sync"}``: in its
attempt of that number a rank does not end so many forwards and backwards of its blocks, or writes of checkpoints. The
other arguments are the example's.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

import rrfp
from rrfp import checkpoint
from rrfp.pipeline.faces import BlockingPipeline

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
train_gpt: Any = import_module("train_gpt")

forward, step = train_gpt.Block.forward, BlockingPipeline.step
left = 0


def count(*_: Any) -> None:
    """One more task or write; the last one does not end."""
    global left
    left -= 1
    if left == 0:
        sys.stdout.write(f"rank {os.environ['RANK']} is killed\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def killed(self: Any, x: Tensor) -> Tensor:
    """A block's forward, which counts, and so does its backward."""
    count()
    y: Tensor = forward(self, x)
    if y.requires_grad:
        y.register_hook(count)  # type: ignore[no-untyped-call]
    return y


def counted(write: Callable[..., Any]) -> Callable[..., Any]:
    """``write``, which counts when it has written."""

    def written(*arguments: Any, **how: Any) -> Any:
        result = write(*arguments, **how)
        count()
        return result

    return written


def at_once(*arguments: Any, **how: Any) -> checkpoint.Saving:
    """`rrfp.checkpoint.save`, in the place of async_save."""
    path, written = checkpoint.save(*arguments, **how), Future[None]()
    written.set_result(None)
    return checkpoint.Saving(path, written)


def reported(self: BlockingPipeline, *batch: Any) -> rrfp.StepResult:
    """A step, whose loss every rank prints."""
    result = step(self, *batch)
    sys.stdout.write(f"rank {os.environ['RANK']} training step {result.step} has loss {result.loss!r}\n")
    sys.stdout.flush()
    return result


def prepare(kills: list[tuple[int, str, int]], save: str) -> None:
    """Replace what counts in this attempt, and what saves."""
    global left
    BlockingPipeline.step = reported  # type: ignore[method-assign, assignment]
    if save == "sync":
        checkpoint.async_save = at_once
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt < len(kills) and kills[attempt][0] == int(os.environ["RANK"]):
        _, what, left = kills[attempt]
        if what == "task":
            train_gpt.Block.forward = killed
        else:
            # Of each tensor into its file, and to the disk: the file, and last the metadata, before it gets its name.
            torch.save, os.fsync = counted(torch.save), counted(os.fsync)


if __name__ == "__main__":
    prepare(**json.loads(sys.argv.pop(1)))
    record(train_gpt.main)()
