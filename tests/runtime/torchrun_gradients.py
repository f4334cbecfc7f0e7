"""Run with torchrun's variables on 4 ranks: compares gradients over zmq with the reference.

``few``: a pipeline of 4 stages for each way to place and to split. ``whole``: one chunk a rank, pipelines of 1, 2 and 4
stages. Both end with a stage that hangs on its lane while another one raises. ``parts``: chunks, split backward and
``deterministic=True``, which must be the reference's bits; 4 stages, and 2 where bits are compared. ``ends``, on 2
ranks: one pipeline of 2, and beside the hanging stage one that raises where its like is in a collective. Prints one
line of JSON a rank.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from on_device import on_double_if_asked
from runtime.toys import Bomb, data, expect, largest_difference, loss_fn, placed, same_bits, stages

import rrfp
from rrfp import timeouts
from rrfp.compute.split import backward as split_backward
from rrfp.errors import PipelineAborted

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

WHOLE: list[dict[str, Any]] = [
    {"hint": "bf"},
    {"hint": "fb", "reduction": "sum"},
    {"hint": "b-priority", "limit": "1f1b"},
    {"hint": "f-priority", "limit": 1},
    {"hint": "bfw", "split": True, "tokens": True},
    {"hint": "1f1b", "tokens": True},
    {"hint": "gpipe", "limit": 3},
    {"strict": "gpipe", "reduction": "sum"},
    {"strict": "1f1b", "tokens": True},
]
V: dict[str, Any] = {"chunks": 2, "placement": "v"}
PARTS: list[dict[str, Any]] = [
    {"hint": "bf", "split": True, "tokens": True},
    {"hint": "zb-h1", "split": True},
    {"strict": "zb-h1", "split": True},
    {"hint": "bfw", "split": True, "deterministic": True, "tokens": True},
    {"hint": "bf", "deterministic": True, "reduction": "sum"},
    {"chunks": 2, "hint": "bf", "limit": 1, "tokens": True},
    {"chunks": 2, "hint": "slot-aware", "split": True},
    {"chunks": 2, "hint": "interleaved-1f1b"},
    {"chunks": 2, "strict": "interleaved-1f1b", "tokens": True},
    {"chunks": 2, "hint": "bfw", "split": True, "deterministic": True, "limit": 1},
    {**V, "hint": "slot-aware", "split": True, "limit": "n"},
    {**V, "hint": "zb-v", "split": True, "reduction": "sum"},
    {**V, "strict": "zb-v", "split": True, "tokens": True},
    {**V, "hint": "bfw", "split": True, "deterministic": True, "tokens": True},
    {**V, "strict": "zb-v", "split": True, "deterministic": True},
]
FEW = [
    {"hint": "bf", "tokens": True},
    {"hint": "zb-h1", "split": True},
    {"chunks": 2, "hint": "bfw", "split": True, "deterministic": True, "limit": 1},
    {**V, "strict": "zb-v", "split": True, "tokens": True},
]


def place(count: int) -> rrfp.Topology:
    """This rank's place among ``WORLD / count`` pipelines side by side."""
    return rrfp.Topology(RANK % count, count, run_id=f"{os.environ['TORCHELASTIC_RUN_ID']}-{count}-{RANK // count}")


def difference(count: int, configuration: dict[str, Any]) -> float:
    """The largest one between this rank's gradients, or losses, and the reference's; infinite where bits must agree."""
    options = dict(configuration)
    tokens, reduction = options.pop("tokens", False), options.get("reduction", "mean")
    sizes = options.pop("microbatches", (1, 3, 8))
    chunks = options.get("chunks", 1)
    actual, expected = stages(count * chunks), stages(count * chunks)
    stage, number, worst = RANK % count, 0, 0.0
    own, theirs = (
        placed(all_parts, count, options.get("placement", "looped"))[stage] for all_parts in (actual, expected)
    )
    with rrfp.Pipeline(own, topology=place(count), loss_fn=loss_fn, **options).blocking() as pipe:
        for microbatches in sizes:
            for module in (*actual, *expected):
                module.zero_grad()
            for _ in range(2):
                batch = data(microbatches, seed=number)
                weights = batch.lengths if tokens else None
                result = pipe.step(
                    batch.inputs if stage == 0 else None,
                    batch.targets if _has_last(stage, count, options) else None,
                    weights=weights if _has_last(stage, count, options) else None,
                    microbatches=microbatches,
                )
                wanted = expect(expected, batch, weights=weights, step=number, reduction=reduction)
                assert result.loss is not None
                assert wanted.loss is not None
                worst = max(worst, abs(result.loss - wanted.loss), *_gaps(result.losses, wanted.losses))
                number += 1
            worst = max(worst, largest_difference(own, theirs))
            if options.get("deterministic") and not (worst == 0 and same_bits(own, theirs)):
                worst = math.inf
    return worst


def _has_last(stage: int, count: int, options: dict[str, Any]) -> bool:
    """Whether the last virtual stage is here, which needs targets and weights."""
    return stage == (0 if options.get("placement") == "v" else count - 1)


def _gaps(left: tuple[float, ...], right: tuple[float, ...]) -> list[float]:
    return [abs(a - b) for a, b in zip(left, right, strict=True)]


def abort_beside_a_busy_lane() -> float:
    """Seconds until this rank has the error; its interpreter ends with the lane still in its task."""

    def doze(number: int) -> None:
        time.sleep(60)

    batch = data(2)
    busy, faulty = (WORLD - 1) // 2, WORLD - 1
    module = Bomb(doze if busy == RANK else None)
    topology = rrfp.Topology(RANK, WORLD, run_id=f"{os.environ['TORCHELASTIC_RUN_ID']}-abort")
    began = time.monotonic()
    expected = ("PipelineAborted", f"aborted by stage {faulty}: ValueError: enough")
    if faulty == RANK:
        expected = ("ValueError", "enough")
    try:
        with rrfp.Pipeline(module, topology=topology, loss_fn=loss_fn).blocking() as pipe:
            if faulty == RANK:
                time.sleep(0.3)
                raise ValueError("enough")
            pipe.step(batch.inputs, batch.targets)
    except (PipelineAborted, ValueError) as error:
        if (type(error).__name__, str(error)) != expected:
            raise
    return time.monotonic() - began


def abort_in_a_group() -> float:
    """Seconds until this rank has the error; the other one of the group is left in a collective."""
    from runtime.torchrun_tensor_parallel import abort_beside_a_collective, meshes

    timeouts.FAILED_PROCESS_GRACE_S = 0.1  # the process at fault does not end here: it goes on
    dist.init_process_group("gloo")
    seconds = abort_beside_a_collective(meshes([(1, 1, 2)])[1, 1, 2])
    dist.destroy_process_group()
    return seconds


def main(what: str) -> None:
    """Run everything on this rank."""
    torch.set_num_threads(1)
    split_backward.MIN_FLOPS = 0.0  # or nothing of this size would be deferred
    runs = [(count, each) for count in (1, 2, 4) for each in WHOLE]
    if what == "few":
        runs = [(4, {**each, "microbatches": (1, 6)}) for each in FEW]
    elif what == "parts":
        runs = [(count, each) for count in (2, 4) for each in PARTS if count == 4 or each.get("deterministic")]
    elif what == "ends":
        runs = [(2, {**WHOLE[0], "microbatches": (1,)})]
    worst = {f"{count} {each}": difference(count, each) for count, each in runs}
    abort_s = [abort_in_a_group()] if what == "ends" else []
    abort_s += [abort_beside_a_busy_lane()] if what != "parts" else []
    report = {"rank": RANK, "worst": worst, "abort_s": max(abort_s, default=0.0)}
    sys.stdout.write(json.dumps(report) + "\n")  # in one piece, since four ranks share the pipe
    sys.stdout.flush()


if __name__ == "__main__":
    with on_double_if_asked():
        main(sys.argv[1])
