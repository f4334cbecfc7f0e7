"""A step of four stages on one device beside the same microbatches in a plain loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    modules = _modules(target, work)
    inputs, targets = _batch(target, work)
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


def _modules(target: Target, work: Work) -> list[nn.Module]:
    with target.where:
        return [stage.to(torch.bfloat16) for stage in build_stages(work.gpt, STAGES)]


def _batch(target: Target, work: Work) -> tuple[list[Tensor], list[Tensor]]:
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
    _wait(target)
    began = time.perf_counter()
    call()
    _wait(target)
    return time.perf_counter() - began


def _wait(target: Target) -> None:
    if target.is_cuda:
        torch.cuda.synchronize()
