"""The cost tables that stand for the paper's workloads: one model for every cell, nothing fitted to a cell.

Each part is either the project's own (profiles, jitter, latency: `rrfp.costs`) or follows from a number in the paper:

- a plain stage at PP 8 takes 52.5 ms for F and B together, the middle of the ranges that the paper gives (F 25-45 ms,
  B 10-25 ms), a third each for F, input gradient and weight gradient. A model cut into more stages has proportionally
  shorter ones: the factor is 8 / PP;
- compute varies from task to task by a lognormal factor whose (p95 - p5) / p50 is 0.73, as the paper measured;
- latency `spike`: 0.4 ms (lognormal), and for 21% of the messages up to 30 ms more; its (p95 - p5) / p50 is near the
  paper's 58.74. `benchmarks/paper/messages.py` runs Tables 1 and 2 with `bimodal` as well, which also has the paper's
  (p75 - p25) / p50 of 50.80;
- tensor parallelism leaves task times as they are (on the paper's PCIe machines iteration times do not fall with TP);
  a message has arrived when the last of its TP ranks has it;
- data parallelism divides the batch; the slower replica counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from benchmarks.paper.claims import COMPUTE_SPREAD
from rrfp.costs import CostTable, make_costs, with_jitter, with_latency
from rrfp.lab.generators.latency import rank_latencies
from rrfp.lab.generators.profiles import PLAIN_BACKWARD, PLAIN_FORWARD, PLAIN_WEIGHT

#: Seconds of F and B of a plain stage at `BASE_STAGES` stages.
PLAIN_STAGE, BASE_STAGES = 0.0525, 8
#: z of the 95th percentile.
_Z95 = 1.6448536
#: Apart from every seed that `rrfp.costs` draws from.
_NOISE = 0x5EED


@dataclass(frozen=True, slots=True)
class Workload:
    """What one simulated iteration runs.

    Attributes:
        family: a cost profile.
        stages: N.
        microbatches: M of one replica.
        tp: ranks whose messages must all have arrived.
        jitter: injected on top of the natural variation.
        latency: a latency model.
        vision: factor on the vision stages of `mllm`.
        last: factor on the last stage.
    """

    family: str
    stages: int
    microbatches: int
    tp: int = 1
    jitter: str = "J0"
    latency: str = "spike"
    vision: float = 1.0
    last: float = 1.0

    def costs(self, seed: int) -> CostTable:
        """The split table, messages as slow as the slowest rank's; `to_unsplit` gives the unsplit one."""
        first = self.first_rank(seed)
        return rank_latencies(first, self.latency, self.tp, seed=seed).slowest(first)

    def first_rank(self, seed: int) -> CostTable:
        """The split table of rank 0 of every group."""
        table = make_costs(self.family, self.stages, self.microbatches, split=True, seed=seed)
        factor = PLAIN_STAGE / (PLAIN_FORWARD + PLAIN_BACKWARD + PLAIN_WEIGHT) * BASE_STAGES / self.stages
        table = _scaled(table, factor * _noise(seed, table))
        stages = np.ones((self.stages, 1))
        stages[: max(1, self.stages // 4)] *= self.vision
        stages[-1] *= self.last
        table = _scaled(table, np.stack([stages] * 3))
        table = with_jitter(table, self.jitter, seed=seed)
        return with_latency(table, self.latency, seed=seed)


def _scaled(table: CostTable, factors: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> CostTable:
    """Factors for F, B and W, each broadcast to V x M."""
    assert table.weight is not None
    return replace(
        table,
        forward=table.forward * factors[0],
        backward=table.backward * factors[1],
        weight=table.weight * factors[2],
    )


def _noise(seed: int, table: CostTable) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """A lognormal factor of median 1 for each F, B and W."""
    random = np.random.default_rng([_NOISE, seed])
    normal = random.standard_normal((3, table.num_virtual_stages, table.microbatches))
    return np.exp(noise_sigma() * normal)


@lru_cache(maxsize=1)
def noise_sigma() -> float:
    """The sigma at which exp(sigma z) - exp(-sigma z), z of the 95th percentile, is the paper's compute spread."""
    return float(np.arcsinh(COMPUTE_SPREAD / 2) / _Z95)
