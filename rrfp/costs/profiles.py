"""Named workloads, and `make_costs`, which turns a name and a seed into a cost table.

A profile gives for each stage and microbatch a factor on the time of a plain stage. A plain stage takes 10 ms forward
and 20 ms backward (10 for the input gradient, 10 for the weight gradient).

Chunks cut the same model finer: the layers that a stage holds on one chunk become C equal parts, and the parts of all
stages in depth order are the virtual stages. The output layer is not cut; it is part of the last one. The placement
decides which parts a stage holds: of two chunks in V, stage 0 has the first half of the first stage's layers, the
second half of the last stage's, and the output layer. A step's work is the same with any number of chunks; a stage's
is not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from rrfp.core.placement import Layout
from rrfp.costs.jitter import with_jitter
from rrfp.costs.latency import with_latency
from rrfp.costs.streams import Matrix, Stream, exp, generator, whole
from rrfp.costs.table import CostTable
from rrfp.errors import ConfigError

#: Seconds of a plain stage for one microbatch: F, the input-gradient part of B, and the weight-gradient part.
PLAIN_FORWARD = PLAIN_BACKWARD = PLAIN_WEIGHT = 0.010

#: Bytes that a plain stage of one chunk holds for one microbatch, from the end of F to the end of its last task.
PLAIN_BYTES = 1_000_000

#: The output layer and the loss, which the last virtual stage also computes, beside the layers of the last stage.
OUTPUT_LAYER = 0.2
#: A vision stage beside a language stage, for a microbatch of average size.
VISION_FACTOR = 1.3
#: Limits of a microbatch's random factor, before it is multiplied by the two constants above.
SMALLEST_FACTOR, LARGEST_FACTOR = 0.2, 5.0


class Profile(Protocol):
    """A workload: the cost of each stage's layers for each microbatch, relative to a plain stage."""

    def __call__(self, stages: int, microbatches: int, random: np.random.Generator, /) -> Matrix:
        """Factors > 0, N x M; row i is stage i, without the output layer. `random` is this step's own stream."""
        ...


def llm(stages: int, microbatches: int, random: np.random.Generator, /) -> Matrix:
    """Uniform stages and microbatches; with the output layer the last stage is 1.2x."""
    return np.ones((stages, microbatches))


def mllm(stages: int, microbatches: int, random: np.random.Generator, /) -> Matrix:
    """A vision encoder on the first max(1, N // 4) stages, a language model on the others.

    Images and text vary independently: the vision stages share the microbatch's factor exp(0.6 z - 0.18), times 1.3;
    the others share its length factor exp(0.25 z' - 0.03125). Both have mean 1 and are clipped to [0.2, 5]. With
    the output layer the last stage is 1.2x.
    """
    normal = random.standard_normal((microbatches, 2))
    vision = np.clip(exp(0.6 * normal[:, 0] - 0.18), SMALLEST_FACTOR, LARGEST_FACTOR) * VISION_FACTOR
    length = np.clip(exp(0.25 * normal[:, 1] - 0.03125), SMALLEST_FACTOR, LARGEST_FACTOR)
    factors = np.tile(length, (stages, 1))
    factors[: max(1, stages // 4)] = vision
    return factors


#: The profiles by the names that `make_costs` and the command line accept.
PROFILES: dict[str, Profile] = {"llm": llm, "mllm": mllm}


def make_costs(
    profile: str,
    stages: int,
    microbatches: int,
    *,
    chunks: int = 1,
    placement: Layout = "looped",
    split: bool = False,
    seed: int = 0,
    step: int = 0,
    jitter: str = "J0",
    latency: str = "none",
    sized: bool = False,
) -> CostTable:
    """The costs of one step: the same table, bitwise, for the same arguments on every machine.

    Split and unsplit tables of one seed agree: `make_costs(..., split=True).to_unsplit()` is the unsplit one.

    Args:
        profile: a name in `PROFILES`.
        stages: N >= 1.
        microbatches: M >= 1.
        chunks: C >= 1 virtual stages a stage.
        placement: "looped" or "v".
        split: whether backward is split into B and W.
        seed: >= 0.
        step: >= 0; every step has its own microbatches, hits and latencies.
        jitter: a name in `JITTER_LEVELS`.
        latency: a model of `LATENCY_MODELS`.
        sized: whether the table has bytes: those of a microbatch on a virtual stage are in proportion to its planned
            time there, without jitter; `PLAIN_BYTES` on a plain stage of one chunk.

    Raises:
        ConfigError: if an argument is not allowed; one line that names it and the allowed values.
    """
    factors, chunks = _factors(profile, stages, microbatches, seed, step), whole("chunks", chunks, 1)
    table = _plain_table(_cut(factors, chunks), stages, chunks, placement)
    if sized:
        table = replace(table, held=table.forward * (PLAIN_BYTES / PLAIN_FORWARD))
    table = with_latency(with_jitter(table, jitter, seed=seed, step=step), latency, seed=seed, step=step)
    # Why not build unsplit tables directly? Split first and merged last, both forms take the same time to the last bit.
    return table if split else table.to_unsplit()


def microbatch_sizes(
    profile: str, stages: int, microbatches: int, *, seed: int = 0, step: int = 0
) -> tuple[float, ...]:
    """The size of each microbatch of `make_costs`, as a trainer knows it before the step.

    It is the time of all tasks of a microbatch together, in seconds, without jitter and latency, which are unknown
    beforehand. It is one number a microbatch, so it does not show how the time is distributed over stages.

    Args:
        profile: a name in `PROFILES`.
        stages: N >= 1.
        microbatches: M >= 1.
        seed: >= 0.
        step: >= 0.

    Returns:
        M numbers > 0.

    Raises:
        ConfigError: if an argument is not allowed; one line that names it and the allowed values.
    """
    total = _cut(_factors(profile, stages, microbatches, seed, step), 1).sum(axis=0)
    return tuple((total * (PLAIN_FORWARD + PLAIN_BACKWARD + PLAIN_WEIGHT)).tolist())


def _factors(profile: str, stages: int, microbatches: int, seed: int, step: int) -> Matrix:
    """The profile's factors of the stages' layers for one step, N x M."""
    if profile not in PROFILES:
        raise ConfigError(f"profile is {profile!r}, must be one of {', '.join(PROFILES)}")
    stages, microbatches = whole("stages", stages, 1), whole("microbatches", microbatches, 1)
    seed, step = whole("seed", seed, 0), whole("step", step, 0)
    return PROFILES[profile](stages, microbatches, generator(Stream.PROFILE, seed, step))


def _cut(factors: Matrix, chunks: int) -> Matrix:
    """The factors of the virtual stages, NC x M: each stage's layers in C equal parts, and the output layer."""
    rows = np.repeat(factors / chunks, chunks, axis=0)
    rows[-1] *= 1 + OUTPUT_LAYER * chunks
    return rows


def _plain_table(rows: Matrix, stages: int, chunks: int, placement: Layout) -> CostTable:
    """Split costs without jitter and latency."""
    virtual_stages, microbatches = rows.shape
    no_latency = np.zeros((virtual_stages - 1, microbatches))
    return CostTable(
        stages=stages,
        chunks=chunks,
        placement=placement,
        microbatches=microbatches,
        forward=PLAIN_FORWARD * rows,
        backward=PLAIN_BACKWARD * rows,
        weight=PLAIN_WEIGHT * rows,
        latency_forward=no_latency,
        latency_backward=no_latency,
    )
