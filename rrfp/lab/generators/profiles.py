"""`make_costs` turns the name of a workload and a seed into a cost table.

A profile (`rrfp.lab.generators.workloads`) gives for each stage and microbatch a factor on the time of a plain stage.
A plain stage takes 10 ms forward and 20 ms backward (10 for the input gradient, 10 for the weight gradient).

Chunks cut the same model finer: the layers that a stage holds on one chunk become C equal parts, and the parts of all
stages in depth order are the virtual stages. The output layer is not cut; it is part of the last one. The placement
decides which parts a stage holds: of two chunks in V, stage 0 has the first half of the first stage's layers, the
second half of the last stage's, and the output layer. A step's work is the same with any number of chunks; a stage's
is not.
"""

from dataclasses import replace

import numpy as np

from rrfp.costs.table import CostTable, Matrix
from rrfp.lab.generators.jitter import with_jitter
from rrfp.lab.generators.latency import with_latency
from rrfp.lab.generators.streams import RandomStream, generator
from rrfp.lab.generators.workloads import PROFILES, machine_factors, output_layer
from rrfp.model.placement import Layout
from rrfp.plain import one_of, whole

#: Seconds of a plain stage for one microbatch: F, the input-gradient part of B, and the weight-gradient part.
PLAIN_FORWARD = PLAIN_BACKWARD = PLAIN_WEIGHT = 0.010

#: Bytes that a plain stage of one chunk holds for one microbatch, from the end of F to the end of its last task.
PLAIN_BYTES = 1_000_000


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
            time there on a machine that is not slow, without jitter; `PLAIN_BYTES` on a plain stage of one chunk.

    Raises:
        ConfigError: if an argument is not allowed; one line that names it and the allowed values.
    """
    factors, chunks = _factors(profile, stages, microbatches, seed, step), whole("chunks", chunks, 1)
    table = _plain_table(_cut(profile, factors, chunks), stages, chunks, placement)
    if sized:
        table = replace(table, held=table.forward * (PLAIN_BYTES / PLAIN_FORWARD))
    table = _on_machines(table, machine_factors(profile, table.stages))
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
    layers = _cut(profile, _factors(profile, stages, microbatches, seed, step), 1)
    total = (machine_factors(profile, stages)[:, np.newaxis] * layers).sum(axis=0)
    return tuple((total * (PLAIN_FORWARD + PLAIN_BACKWARD + PLAIN_WEIGHT)).tolist())


def _factors(profile: str, stages: int, microbatches: int, seed: int, step: int) -> Matrix:
    """The factors of the stages' layers for one step, N x M."""
    one_of(PROFILES, "profile", profile)
    stages, microbatches = whole("stages", stages, 1), whole("microbatches", microbatches, 1)
    seed, step = whole("seed", seed, 0), whole("step", step, 0)
    return PROFILES[profile](stages, microbatches, generator(RandomStream.PROFILE, seed, step))


def _cut(profile: str, factors: Matrix, chunks: int) -> Matrix:
    """The factors of the virtual stages, NC x M, output layer included."""
    rows = np.repeat(factors / chunks, chunks, axis=0)
    rows[-1] *= 1 + output_layer(profile) * chunks
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


def _on_machines(table: CostTable, factors: Matrix) -> CostTable:
    """The split table with each stage's tasks as long as its machine takes."""
    assert table.weight is not None
    rows = factors[[table.stage_of(v) for v in range(table.num_virtual_stages)], np.newaxis]
    forward, backward, weight = (times * rows for times in (table.forward, table.backward, table.weight))
    return replace(table, forward=forward, backward=backward, weight=weight)
