"""Run under torchrun, all ranks on one device: compares each rank's gradients with the one-process reference.

Arguments: the device, the model, and the names of methods. Prints one line of JSON a rank.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from gpu.models import DEMO, LARGE, loss_fn, placed, worst_difference

import rrfp
from benchmarks.gpu.target import Target, open_target
from rrfp.compute.split import backward as split_backward

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS = 2
MODELS = {"demo": DEMO, "large": LARGE}
METHODS: dict[str, dict[str, Any]] = {
    "bf": {"hint": "bf"},
    "bfw, split": {"hint": "bfw", "split": True},
    "zb-v, v": {"hint": "zb-v", "split": True, "placement": "v"},
}


def differences(model_name: str, method: str, target: Target) -> tuple[float, float]:
    """The largest relative ones between this rank's gradients, and between the losses, and the reference's."""
    model, options = MODELS[model_name][target.name], METHODS[method]
    layout = options.get("placement", "looped")
    count = WORLD * (2 if layout == "v" else 1)
    own = placed(model.build(target, count), WORLD, layout)[RANK]
    losses = []
    with rrfp.Pipeline(own, loss_fn=loss_fn, **target.options, **options).blocking() as pipe:
        for step in range(STEPS):
            inputs, targets = model.batch(target, step)
            result = pipe.step(
                inputs if RANK == 0 else None,
                targets if (0 if layout == "v" else WORLD - 1) == RANK else None,
                microbatches=model.microbatches,
            )
            losses.append(result.losses)
    expected = model.build(target, count)
    wanted = model.expect(expected, target, STEPS)
    gaps = [
        abs(loss - want) / abs(want)
        for ours, theirs in zip(losses, wanted, strict=True)
        for loss, want in zip(ours, theirs.losses, strict=True)
    ]
    return worst_difference(own, placed(expected, WORLD, layout)[RANK]), max(gaps)


def main(device: str, model_name: str, *methods: str) -> None:
    """Run everything on this rank."""
    torch.set_num_threads(1)
    split_backward.MIN_FLOPS = 0.0  # or nothing of a test's size would be deferred
    with open_target(device) as target:
        worst = {method: differences(model_name, method, target) for method in methods}
        report = {"rank": RANK, "worst": worst, "problems": target.take_problems()}
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
