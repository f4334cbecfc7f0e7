"""A split backward beside the ordinary one and torch.distributed.pipelining's, in one run: time and bytes.

    python benchmarks/split_backward.py [--rounds N] [--quick] [--json]

A stack of GPT blocks on one thread, sequence 256, a microbatch of one sequence. The three ways alternate in every
round; times are CPU times of the thread, figures are medians of ratios to the ordinary backward in the same round.

F+B+W: the whole of a microbatch over F + ordinary backward. The aim is at most 1.03 from hidden size 512 on.
B+W, B: over the ordinary backward alone.
kept: bytes that stay allocated between B and W for a microbatch, measured by the process's memory over several
microbatches, over what has to stay: the inputs of the linear layers and the gradients of their outputs. The aim is at
most 1.10 from hidden size 512 on.
`--quick` only shows that everything runs: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _figures import Aim, aims_table, table_of
from _load import OtherLoad
from rich.console import Console
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional

from rrfp.compute.split_backward import input_gradients

SEQUENCE, BLOCKS, HEADS = 256, 4, 8
HIDDEN = (64, 128, 256, 512, 768)
#: From this hidden size on the aims hold.
LARGE = 512
MOST_TIME, MOST_KEPT = 1.03, 1.10
#: Microbatches between B and W when memory is measured.
PENDING = 8

Weight = Callable[[], None]


class Block(nn.Module):
    """A GPT block."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.mix, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.wide, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        batch, length, hidden = x.shape
        mixed = self.mix(self.first(x)).view(batch, length, 3, HEADS, hidden // HEADS).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(mixed[0], mixed[1], mixed[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, hidden))
        result: Tensor = x + self.narrow(functional.gelu(self.wide(self.second(x))))
        return result


def ordinary(module: nn.Module, x: Tensor, output: Tensor, gradient: Tensor) -> Weight:
    """One backward."""
    torch.autograd.backward(output, gradient)
    return _nothing


def ours(module: nn.Module, x: Tensor, output: Tensor, gradient: Tensor) -> Weight:
    """RRFP's."""
    edge = get_gradient_edge(output)
    _, pending = input_gradients([edge], [gradient], [x])
    return pending.add_to_gradients


def torchs(module: nn.Module, x: Tensor, output: Tensor, gradient: Tensor) -> Weight:
    """torch.distributed.pipelining's."""
    parameters: Any = module.parameters
    _, groups = stage_backward_input([output], [gradient], [x], parameters())

    def weight() -> None:
        stage_backward_weight(parameters(), groups)

    return weight


def _nothing() -> None:
    """Nothing is left for W."""


WAYS = {"ordinary": ordinary, "rrfp": ours, "torch pipelining": torchs}


@dataclass(frozen=True, slots=True)
class Figures:
    """One way at one hidden size; see the head of this file."""

    total: float
    backward: float
    input_part: float
    kept_bytes: float
    kept: float


def timed(way: str, module: nn.Module, x: Tensor, gradient: Tensor) -> tuple[float, float, float]:
    """Seconds of F, B and W."""
    leaf = x.detach().requires_grad_()
    times = [time.thread_time()]
    output = module(leaf)
    times.append(time.thread_time())
    weight = WAYS[way](module, leaf, output, gradient)
    times.append(time.thread_time())
    weight()
    times.append(time.thread_time())
    module.zero_grad(set_to_none=True)
    return times[1] - times[0], times[2] - times[1], times[3] - times[2]


def kept_bytes(way: str, hidden: int) -> float:
    """Bytes of one microbatch between B and W, measured in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "--kept", way, "--hidden", str(hidden)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return float(done.stdout)


def measure_kept(way: str, hidden: int) -> float:
    """In the process of `kept_bytes`."""
    module, x, gradient = _workload(hidden)
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


def _workload(hidden: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(*[Block(hidden) for _ in range(BLOCKS)])
    return module, torch.randn(1, SEQUENCE, hidden), torch.randn(1, SEQUENCE, hidden)


def ideal_bytes(hidden: int) -> int:
    """What W cannot do without: inputs and output gradients of four linear layers a block, float32."""
    inputs, gradients = hidden * (1 + 1 + 1 + 4), hidden * (3 + 1 + 4 + 1)
    return BLOCKS * SEQUENCE * (inputs + gradients) * 4


def measure(hidden: int, rounds: int) -> dict[str, Figures]:
    """All ways at one hidden size."""
    module, x, gradient = _workload(hidden)
    for way in WAYS:
        timed(way, module, x, gradient)
    rows: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, times in rows.items():
            times.append(timed(way, module, x, gradient))
    base = rows["ordinary"]
    found = {}
    for way, times in rows.items():
        kept = 0.0 if way == "ordinary" else kept_bytes(way, hidden)
        found[way] = Figures(
            median(sum(own) / sum(one) for own, one in zip(times, base, strict=True)),
            median((own[1] + own[2]) / one[1] for own, one in zip(times, base, strict=True)),
            median(own[1] / one[1] for own, one in zip(times, base, strict=True)),
            kept,
            kept / ideal_bytes(hidden),
        )
    return found


def aims_of(figures: dict[int, dict[str, Figures]]) -> list[Aim]:
    """Ours at the large sizes, in percent."""
    return [
        aim
        for hidden, ways in figures.items()
        if hidden >= LARGE
        for aim in (
            Aim(f"F+B+W, hidden {hidden}", 100 * ways["rrfp"].total, 100 * MOST_TIME, unit="%"),
            Aim(f"kept, hidden {hidden}", 100 * ways["rrfp"].kept, 100 * MOST_KEPT, unit="%"),
        )
    ]


def print_tables(figures: dict[int, dict[str, Figures]], aims: Sequence[Aim]) -> None:
    """For people."""
    console = Console()
    title = f"{BLOCKS} GPT blocks, sequence {SEQUENCE}, one thread"
    table = table_of(title, "hidden", "way", "F+B+W", "B+W", "B", "kept MiB", "kept / ideal")
    for hidden, ways in figures.items():
        for way, one in ways.items():
            ratios = (f"{one.total:.3f}", f"{one.backward:.3f}", f"{one.input_part:.3f}")
            table.add_row(str(hidden), way, *ratios, f"{one.kept_bytes / 2**20:.1f}", f"{one.kept:.2f}")
    console.print(table)
    console.print(aims_table(aims))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Split backward, ordinary backward and torch's split.")
    parser.add_argument("--rounds", type=int, default=25, help="measured rounds, at least 1")
    parser.add_argument("--quick", action="store_true", help="a smoke run: its figures mean nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--kept", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--hidden", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}, must be at least 1")
    torch.set_num_threads(1)
    if arguments.kept:
        print(measure_kept(arguments.kept, arguments.hidden))
        return
    load = OtherLoad()
    sizes, rounds = (HIDDEN[:2], 1) if arguments.quick else (HIDDEN, arguments.rounds)
    figures = {hidden: measure(hidden, rounds) for hidden in sizes}
    aims = aims_of(figures)
    if arguments.json:
        plain = {hidden: {way: asdict(one) for way, one in ways.items()} for hidden, ways in figures.items()}
        print(json.dumps({"figures": plain, "aims": [aim.to_json() for aim in aims], "other_load": load.share()}))
    else:
        print_tables(figures, aims)
        print(load.sentence())


if __name__ == "__main__":
    main()
