"""A step of four stages on one device beside the same microbatches in a plain loop."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import rrfp
from benchmarks.gpu.target import Target
from rrfp.lab.demo.model import GptConfig, build_stages, loss_fn

STAGES = 4

#: A pair counts as disturbed if its plain step took this much longer than the median one.
DISTURBED = 1.1


@dataclass(frozen=True, slots=True)
class Work:
    """The model and the size of a step.

    Attributes:
        gpt: the model, whose parameters are bfloat16.
        rows: of a microbatch.
        microbatches: M.
        steps: pairs of steps that are measured.
    """

    gpt: GptConfig
    rows: int
    microbatches: int
    steps: int


LARGE = Work(GptConfig(vocabulary=8192, sequence_length=2048, layers=8, width=4096, heads=32), 1, 16, 12)
SMALL = Work(GptConfig(vocabulary=64, sequence_length=16, layers=4, width=32, heads=4), 1, 4, 2)

WORKS = {"large": LARGE, "small": SMALL}

#: Transports between processes on one device: tensors are pulled, or staged.
WAYS = ("cuda_ipc", "shm")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians over the pairs that were not disturbed.

    Attributes:
        plain_s: a step of the plain loop.
        pipeline_s: a step by `rrfp.local`.
        ratio: the median of the pairs' ratios.
        disturbed: pairs that were discarded.
        pairs: all pairs.
        peak_held: microbatches held by each stage.
    """

    plain_s: float
    pipeline_s: float
    ratio: float
    disturbed: int
    pairs: int
    peak_held: tuple[int, ...]


def measure_step(target: Target, work: Work) -> StepTimes:
    """Plain and pipeline steps take turns, on the same modules."""
    modules = modules_of(target, work, STAGES)
    inputs, targets = batch_of(target, work)
    options = {} if target.is_cuda else {"device": target.device}
    plain: list[float] = []
    piped: list[float] = []
    held: tuple[int, ...] = ()
    with rrfp.local(modules, loss_fn=loss_fn, **options).blocking() as pipe:  # type: ignore[arg-type]

        def pipeline_step() -> None:
            nonlocal held
            held = pipe.step(inputs, targets).peak_held

        for index in range(work.steps + 2):
            plain_s = _seconds(target, modules, lambda: _plain_step(modules, inputs, targets))
            piped_s = _seconds(target, modules, pipeline_step)
            if index >= 2:  # the first warm up
                plain.append(plain_s)
                piped.append(piped_s)
    limit = DISTURBED * statistics.median(plain)
    kept = [pair for pair in zip(plain, piped, strict=True) if pair[0] <= limit]
    return StepTimes(
        statistics.median(pair[0] for pair in kept),
        statistics.median(pair[1] for pair in kept),
        statistics.median(pair[1] / pair[0] for pair in kept),
        len(plain) - len(kept),
        len(plain),
        held,
    )


@dataclass(frozen=True, slots=True)
class TwoProcesses:
    """A step of two stages, each in a process of its own on the same device.

    Attributes:
        by_way: the median step over each transport, as the slower process saw it.
        ratio: the median of the pairs' ratios, pulled by staged.
    """

    by_way: Mapping[str, float]
    ratio: float


def measure_two_processes(target: Target, size: str) -> TwoProcesses:
    """Steps that pull tensors and steps that stage them take turns; ``size`` is a name of `WORKS`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(Path(__file__).with_name("step_ranks.py"))
    done = subprocess.run(
        [*command, script, target.name, size], capture_output=True, text=True, timeout=240, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-2000:]}")
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    slower = {way: [max(pair) for pair in zip(*(rank[way] for rank in ranks), strict=True)] for way in WAYS}
    ratios = [pulled / staged for pulled, staged in zip(slower["cuda_ipc"], slower["shm"], strict=True)]
    return TwoProcesses({way: statistics.median(each) for way, each in slower.items()}, statistics.median(ratios))


def modules_of(target: Target, work: Work, stages: int) -> list[nn.Module]:
    """The model, cut into stages."""
    with target.where:
        return [stage.to(torch.bfloat16) for stage in build_stages(work.gpt, stages)]


def batch_of(target: Target, work: Work) -> tuple[list[Tensor], list[Tensor]]:
    shape = (work.microbatches, work.rows, work.gpt.sequence_length + 1)
    tokens = torch.randint(work.gpt.vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(target.where)
    return [text[:, :-1].contiguous() for text in tokens], [text[:, 1:].contiguous() for text in tokens]


def _plain_step(modules: Sequence[nn.Module], inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for value, wanted in zip(inputs, targets, strict=True):
        for module in modules:
            value = module(value)
        (loss_fn(value, wanted) / len(inputs)).backward()  # type: ignore[no-untyped-call]


def _seconds(target: Target, modules: Sequence[nn.Module], call: Callable[[], None]) -> float:
    for module in modules:
        module.zero_grad()
    target.synchronize()
    began = time.perf_counter()
    call()
    target.synchronize()
    return time.perf_counter() - began
