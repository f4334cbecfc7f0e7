"""Run under torchrun: trains models of as many stages as there are ranks, and compares with the unsplit model.

Usage: ``torchrun ... torchrun_models.py MODEL,... CONFIGURATION,...``. Prints one JSON line a rank: the largest error
of what it has, for each run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import torch
from models.case import Case
from models.catalogue import CONFIGURATIONS, Configuration, build, load, runs, stages_of
from models.training import Step, errors, names_in, train, train_plainly
from torch import nn

import rrfp
from rrfp.compute.split import backward as split_backward

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MIN_FLOPS = split_backward.MIN_FLOPS


def error(case: Case, configuration: Configuration, expected: Sequence[Step]) -> float:
    """The largest one of this rank."""
    split_backward.MIN_FLOPS = 0.0 if configuration.defer_all else MIN_FLOPS
    model = build(case)
    stages = stages_of(case, model)
    assert len(stages) == WORLD
    here = stages[RANK]
    ties = ties_of(model, stages)
    with rrfp.Pipeline(here, ties=ties, **configuration.options(case)).blocking() as pipe:
        actual = train(case, pipe, configuration, model, here)
    return max(errors(actual, expected, names_in(model, here), in_order=configuration.deterministic))


def ties_of(model: nn.Module, stages: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """This rank's parameters that other stages have too, by their names in the whole model."""
    holders = [{id(parameter) for parameter in stage.parameters()} for stage in stages]
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in holders[RANK] and sum(id(parameter) in held for held in holders) > 1
    }


def main(models: str, configurations: str) -> None:
    """Run everything on this rank."""
    torch.set_num_threads(1)
    worst = {}
    for name in models.split(","):
        case = load(name)
        expected = train_plainly(case)
        for chosen in configurations.split(","):
            if (name, chosen) not in runs():
                continue
            worst[f"{name} {chosen}"] = error(case, CONFIGURATIONS[chosen], expected)
    sys.stdout.write(json.dumps({"rank": RANK, "worst": worst}) + "\n")  # in one piece, since the ranks share the pipe
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
