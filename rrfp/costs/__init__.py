"""Seeded cost tables of a step, for emulated lanes, the simulator and benchmarks.

Pure numpy: no clock, no torch, no I/O except the cost file. The same seed gives every method the same table, bitwise.
"""

from rrfp.costs.files import from_json, read_costs, to_json, write_costs
from rrfp.costs.jitter import JITTER_LEVELS, JitterLevel, with_jitter
from rrfp.costs.latency import LATENCY_MODELS, with_latency
from rrfp.costs.profiles import make_costs, microbatch_sizes
from rrfp.costs.table import PLACEMENTS, CostTable
from rrfp.costs.workloads import PROFILES, Profile

__all__ = [
    "JITTER_LEVELS",
    "LATENCY_MODELS",
    "PLACEMENTS",
    "PROFILES",
    "CostTable",
    "JitterLevel",
    "Profile",
    "from_json",
    "make_costs",
    "microbatch_sizes",
    "read_costs",
    "to_json",
    "with_jitter",
    "with_latency",
    "write_costs",
]
