"""A rank of two, of which only the second meets trouble with a checkpoint; prints what each call raised, as JSON."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rrfp import checkpoint
from rrfp.errors import RrfpError


def error_of(call: Callable[[], Any]) -> str:
    """Its type and text."""
    try:
        call()
    except RrfpError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def run(folder: Path) -> dict[str, Any]:
    """Every case, one after the other."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    parts = {f"layers.{rank}": nn.Linear(16, 16)}
    adam, sgd = (kind(parts[f"layers.{rank}"].parameters(), lr=0.1) for kind in (torch.optim.AdamW, torch.optim.SGD))
    first = checkpoint.save(folder, parts, adam, step=1)
    errors = {
        "extra": error_of(lambda: checkpoint.save(folder, parts, adam, step=2, extra=(lambda: 1) if rank else None)),
        "optimizer": error_of(lambda: checkpoint.load(folder, parts, sgd if rank else adam)),
    }
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    saving = None
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    saving = checkpoint.async_save(folder, parts, adam, step=2)
    errors["full"] = error_of(saving.result)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    errors["after"] = error_of(lambda: checkpoint.latest(folder))
    second = checkpoint.save(folder, parts, adam, step=2, keep=2)
    dist.barrier()
    left = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    if rank == 0:
        (second / "__1_0.distcp").unlink()
    errors["half"] = error_of(lambda: checkpoint.load(folder, parts, adam))
    errors["older"] = error_of(lambda: checkpoint.load(folder, parts, adam, path=first))
    dist.destroy_process_group()
    return {"rank": rank, "errors": errors, "left": left}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(run(Path(sys.argv[1]))) + "\n")
