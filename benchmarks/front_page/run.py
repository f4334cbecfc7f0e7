"""The picture of README.md and its figures: 1F1B and the default hint in the same memory, simulated. Half a minute.

    python benchmarks/front_page/run.py [--png FILE] [--quick] [--json]

Eight stages, 24 microbatches, profile mllm, jitter J2, 20 seeds. The hint receives each microbatch's planned time,
without jitter. A gain is 1F1B's time over the hint's on the same table; shown are its mean and extremes. Drawn is the
step whose gain in 1F1B's memory is the median.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.shared.options import parsed, parser_of
from rrfp.costs import make_costs
from rrfp.errors import ConfigError
from rrfp.lab.generators.profiles import microbatch_sizes
from rrfp.lab.simulation import Simulation, simulate
from rrfp.lab.traces.timeline import plot_timelines

PROFILE, STAGES, MICROBATCHES, JITTER, SEEDS, QUICK_SEEDS = "mllm", 8, 24, "J2", 20, 2
#: What the default hint may hold, and whether backward is split.
METHODS = {
    "same memory": ("1f1b", False),
    "same memory, split backward": ("1f1b", True),
    "limit 2n": ("2n", False),
    "limit 2n, split backward": ("2n", True),
}
#: Inches: 800 pixels.
WIDTH = 800 / 144


def fixed(seed: int) -> Simulation:
    """Strict 1F1B."""
    return simulate(make_costs(PROFILE, STAGES, MICROBATCHES, jitter=JITTER, seed=seed), strict="1f1b")


def default(seed: int, method: str) -> Simulation:
    """The default hint, which knows the sizes of the step's microbatches."""
    limit, split = METHODS[method]
    costs = make_costs(PROFILE, STAGES, MICROBATCHES, jitter=JITTER, seed=seed, split=split)
    sizes = microbatch_sizes(PROFILE, STAGES, MICROBATCHES, seed=seed)
    return simulate(costs, hint="slot-aware-pyramid", limit=limit, sizes=sizes)


def gains(seeds: Sequence[int], method: str) -> list[float]:
    """By seed, 1F1B's time over the default hint's."""
    return [fixed(seed).result.makespan / default(seed, method).result.makespan for seed in seeds]


def draw(path: Path, seeds: Sequence[int]) -> None:
    """The step of the gain in the middle, of two the lower."""
    by_seed = gains(seeds, "same memory")
    seed = seeds[by_seed.index(statistics.median_low(by_seed))]
    rows = [
        ("1F1B, fixed order", fixed(seed).result.trace()),
        ("RRFP, default hint, same memory", default(seed, "same memory").result.trace()),
    ]
    plot_timelines(rows, path, width=WIDTH, panels=False)


def main() -> None:
    """Run, print and draw."""
    parser = parser_of("README.md's picture and figures.")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the picture")
    arguments = parsed(parser)
    seeds = range(QUICK_SEEDS if arguments.quick else SEEDS)
    found = {method: gains(seeds, method) for method in METHODS}
    try:
        if arguments.png:
            draw(arguments.png, seeds)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"1F1B's time over the default hint's, {len(seeds)} seeds: mean, least and most")
    for method, by_seed in found.items():
        print(f"{method:30}{statistics.mean(by_seed):.2f}  {min(by_seed):.2f} - {max(by_seed):.2f}")


if __name__ == "__main__":
    main()
