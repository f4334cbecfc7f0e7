"""Draws the picture of README.md and prints its figures: ``python tests/docs/front_picture.py docs/timeline.png``.

1F1B and the default hint in the same memory, on steps of the profile ``mllm`` that differ in their seeds. Drawn is the
step whose gain is the median.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from rrfp.costs import make_costs
from rrfp.lab.generators.profiles import microbatch_sizes
from rrfp.lab.simulation import Simulation, simulate
from rrfp.lab.traces.timeline import plot_timelines

PROFILE, STAGES, MICROBATCHES, JITTER, SEEDS = "mllm", 8, 24, "J2", range(20)
#: Inches: 800 pixels.
WIDTH = 800 / 144


def fixed(seed: int) -> Simulation:
    """Strict 1F1B."""
    return simulate(make_costs(PROFILE, STAGES, MICROBATCHES, jitter=JITTER, seed=seed), strict="1f1b")


def default(seed: int, *, limit: str = "1f1b", split: bool = False) -> Simulation:
    """The default hint, which knows the sizes of the step's microbatches."""
    costs = make_costs(PROFILE, STAGES, MICROBATCHES, jitter=JITTER, seed=seed, split=split)
    sizes = microbatch_sizes(PROFILE, STAGES, MICROBATCHES, seed=seed)
    return simulate(costs, hint="slot-aware-pyramid", limit=limit, sizes=sizes)


def gains(*, limit: str = "1f1b", split: bool = False) -> list[float]:
    """By seed, 1F1B's time over the default hint's."""
    runs = [(fixed(seed), default(seed, limit=limit, split=split)) for seed in SEEDS]
    return [one.result.makespan / other.result.makespan for one, other in runs]


def median_seed(by_seed: list[float]) -> int:
    """The seed of the gain in the middle, of the two the lower."""
    return SEEDS[by_seed.index(statistics.median_low(by_seed))]


def main(path: Path) -> None:
    """Draw, and print what the caption says."""
    here = gains()
    seed = median_seed(here)
    rows = [
        ("1F1B, fixed order", fixed(seed).result.trace()),
        ("RRFP, default hint, same memory", default(seed).result.trace()),
    ]
    plot_timelines(rows, path, width=WIDTH, panels=False)
    print(f"drawn: seed {seed}; 1F1B's time over the default hint's, mean of {len(SEEDS)} seeds:")
    for text, by_seed in (
        ("same memory", here),
        ("same memory, split backward", gains(split=True)),
        ("limit 2n", gains(limit="2n")),
        ("limit 2n, split backward", gains(limit="2n", split=True)),
    ):
        print(f"{text:30}{statistics.mean(by_seed):.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
