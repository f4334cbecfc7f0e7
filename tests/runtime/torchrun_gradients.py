"""Run under torchrun on 4 ranks: compares gradients over zmq with the reference, for pipelines of 1, 2 and 4 stages.

Prints one JSON line a rank; the last configuration ends with a stage that hangs on its lane while another one raises.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from runtime.toys import Bomb, data, expect, largest_difference, loss_fn, stages

import rrfp
from rrfp.errors import PipelineAborted

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

CONFIGURATIONS: list[dict[str, Any]] = [
    {"hint": "bf"},
    {"hint": "fb", "reduction": "sum"},
    {"hint": "b-priority", "limit": "1f1b"},
    {"hint": "f-priority", "limit": 1},
    {"hint": "bfw", "tokens": True},
    {"hint": "1f1b", "tokens": True},
    {"hint": "gpipe", "limit": 3},
    {"strict": "gpipe", "reduction": "sum"},
    {"strict": "1f1b", "tokens": True},
]


def place(count: int) -> rrfp.Topology:
    """This rank's place among ``WORLD / count`` pipelines side by side."""
    return rrfp.Topology(RANK % count, count, run_id=f"{os.environ['TORCHELASTIC_RUN_ID']}-{count}-{RANK // count}")


def difference(count: int, configuration: dict[str, Any]) -> float:
    """The largest one between this rank's gradients, or losses, and the reference's."""
    options = dict(configuration)
    tokens, reduction = options.pop("tokens", False), options.get("reduction", "mean")
    actual, expected = stages(count), stages(count)
    stage, number, worst = RANK % count, 0, 0.0
    with rrfp.Pipeline(actual[stage], topology=place(count), loss_fn=loss_fn, **options).blocking() as pipe:
        for microbatches in (1, 3, 8):
            for module in (*actual, *expected):
                module.zero_grad()
            for _ in range(2):
                batch = data(microbatches, seed=number)
                weights = batch.lengths if tokens else None
                result = pipe.step(
                    batch.inputs if stage == 0 else None,
                    batch.targets if stage == count - 1 else None,
                    weights=weights if stage == count - 1 else None,
                    microbatches=microbatches,
                )
                wanted = expect(expected, batch, weights=weights, step=number, reduction=reduction)
                assert result.loss is not None
                assert wanted.loss is not None
                worst = max(worst, abs(result.loss - wanted.loss), *_gaps(result.losses, wanted.losses))
                number += 1
            worst = max(worst, largest_difference([actual[stage]], [expected[stage]]))
    return worst


def _gaps(left: tuple[float, ...], right: tuple[float, ...]) -> list[float]:
    return [abs(a - b) for a, b in zip(left, right, strict=True)]


def abort_beside_a_busy_lane() -> float:
    """Seconds until this rank has the error; its interpreter ends with the lane still in its task."""

    def doze(number: int) -> None:
        time.sleep(60)

    batch = data(2)
    module = Bomb(doze if RANK == 1 else None)
    topology = rrfp.Topology(RANK, WORLD, run_id=f"{os.environ['TORCHELASTIC_RUN_ID']}-abort")
    began = time.monotonic()
    expected = ("ValueError", "enough") if RANK == 3 else ("PipelineAborted", "aborted by stage 3: ValueError: enough")
    try:
        with rrfp.Pipeline(module, topology=topology, loss_fn=loss_fn).blocking() as pipe:
            if RANK == 3:
                time.sleep(0.3)
                raise ValueError("enough")
            pipe.step(batch.inputs, batch.targets)
    except (PipelineAborted, ValueError) as error:
        if (type(error).__name__, str(error)) != expected:
            raise
    return time.monotonic() - began


def main() -> None:
    """Run everything on this rank."""
    torch.set_num_threads(1)
    worst = {}
    for count in (1, 2, 4):
        for configuration in CONFIGURATIONS:
            worst[f"{count} {configuration}"] = difference(count, configuration)
    line = json.dumps({"rank": RANK, "worst": worst, "abort_s": abort_beside_a_busy_lane()})
    sys.stdout.write(line + "\n")  # in one piece, since four ranks share the pipe
    sys.stdout.flush()


if __name__ == "__main__":
    main()
