"""A process of the split-backward benchmark: measures one thing at one hidden size, prints it as JSON.

malloc's settings are given to a process at its start, so what is measured under other ones needs another process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.split_backward.ways import LAYERS, ORDINARY, WAYS, Weight, blocks, layers, microbatch, timed

#: Microbatches between B and W when memory is measured.
PENDING = 8


def times(hidden: int, rounds: int, ways: list[str]) -> dict[str, list[tuple[float, float, float]]]:
    """By way: seconds of F, B and W in each round; all ways alternate in a round."""
    return _rounds(blocks(hidden), hidden, rounds, ways)


def _rounds(
    module: nn.Module, hidden: int, rounds: int, ways: list[str]
) -> dict[str, list[tuple[float, float, float]]]:
    x, gradient = microbatch(hidden)
    for way in ways:
        timed(way, module, x, gradient)
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, mine in found.items():
            mine.append(timed(way, module, x, gradient))
    return found


def layer(hidden: int, rounds: int, ways: list[str]) -> dict[str, float]:
    """Of one linear layer: seconds that deferring its weight gradient costs, and seconds of that product itself."""
    (way,) = ways
    found = _rounds(layers(hidden), hidden, rounds, [ORDINARY, way])
    costs = [sum(own[1:]) - sum(base[1:]) for own, base in zip(found[way], found[ORDINARY], strict=True)]
    x, gradient = (tensor[0] for tensor in microbatch(hidden))
    products = []
    for _ in range(rounds):
        started = time.thread_time()
        for _ in range(LAYERS):
            gradient.t() @ x
        products.append(time.thread_time() - started)
    return {"cost": median(costs) / LAYERS, "product": median(products) / LAYERS}


def kept(hidden: int, rounds: int, ways: list[str]) -> dict[str, float]:
    """By way: bytes of one microbatch that stay between B and W, by what the process grows by."""
    return {way: _kept(way, hidden) for way in ways}


def _kept(way: str, hidden: int) -> float:
    module, (x, gradient) = blocks(hidden), microbatch(hidden)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def backward() -> Weight:
        leaf = x.detach().clone().requires_grad_()
        return WAYS[way](module, leaf, module(leaf), gradient.clone())

    backward()()
    gc.collect()
    before = _resident()
    waiting = [backward() for _ in range(PENDING)]
    gc.collect()
    grown = _resident() - before
    for weight in waiting:
        weight()
    return grown / PENDING


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Entry point: what, hidden size, rounds, ways."""
    torch.set_num_threads(1)
    what, hidden, rounds, *ways = sys.argv[1:]
    measure: Any = {"times": times, "layer": layer, "kept": kept}[what]
    sys.stdout.write(json.dumps(measure(int(hidden), int(rounds), ways)))


if __name__ == "__main__":
    main()
