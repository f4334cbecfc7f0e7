"""Seeded cost tables of a step, for emulated lanes, the simulator and benchmarks.

Pure numpy: no clock, no torch, no I/O except the cost file. The same seed gives every method the same table, bitwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rrfp.laboratory import PUBLIC
from rrfp.lazy_names import homes_of, lazy_names

# For type checkers: `as` marks a public name.
if TYPE_CHECKING:
    from rrfp.costs.files import from_json as from_json
    from rrfp.costs.files import read_costs as read_costs
    from rrfp.costs.files import to_json as to_json
    from rrfp.costs.files import write_costs as write_costs
    from rrfp.costs.table import PLACEMENTS as PLACEMENTS
    from rrfp.costs.table import CostTable as CostTable
    from rrfp.lab.generators.jitter import JITTER_LEVELS as JITTER_LEVELS
    from rrfp.lab.generators.jitter import JitterLevel as JitterLevel
    from rrfp.lab.generators.jitter import with_jitter as with_jitter
    from rrfp.lab.generators.latency import LATENCY_MODELS as LATENCY_MODELS
    from rrfp.lab.generators.latency import with_latency as with_latency
    from rrfp.lab.generators.profiles import make_costs as make_costs
    from rrfp.lab.generators.profiles import microbatch_sizes as microbatch_sizes
    from rrfp.lab.generators.workloads import PROFILES as PROFILES
    from rrfp.lab.generators.workloads import Profile as Profile

_OWN = homes_of(
    {
        "rrfp.costs.files": "from_json read_costs to_json write_costs",
        "rrfp.costs.table": "PLACEMENTS CostTable",
    }
)

__all__, __getattr__, __dir__ = lazy_names(__name__, {**_OWN, **PUBLIC[__name__]})
