"""The training example, in which rank 1 fails in its second step, unless torchrun has restarted the job."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
train_gpt: Any = import_module("train_gpt")

loss_fn = train_gpt.loss_fn
microbatches = 0


def fails(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss, for the microbatches of one step."""
    global microbatches
    microbatches += 1
    if microbatches > int(sys.argv[sys.argv.index("--microbatches") + 1]):
        raise RuntimeError("enough")
    loss: Tensor = loss_fn(logits, targets)
    return loss


if __name__ == "__main__":
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        train_gpt.loss_fn = fails
    record(train_gpt.main)()
