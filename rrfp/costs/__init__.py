"""Seeded cost tables of a step, for emulated lanes, the simulator and benchmarks.

Pure numpy: no clock, no torch, no I/O except the cost file. The same seed gives every method the same table, bitwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rrfp.costs.files import from_json as from_json
from rrfp.costs.files import read_costs as read_costs
from rrfp.costs.files import to_json as to_json
from rrfp.costs.files import write_costs as write_costs
from rrfp.costs.table import PLACEMENTS as PLACEMENTS
from rrfp.costs.table import CostTable as CostTable
from rrfp.laboratory import PUBLIC, public_name

# For type checkers, which do not run __getattr__: `as` marks a public name.
if TYPE_CHECKING:
    from rrfp.lab.generators.jitter import JITTER_LEVELS as JITTER_LEVELS
    from rrfp.lab.generators.jitter import JitterLevel as JitterLevel
    from rrfp.lab.generators.jitter import with_jitter as with_jitter
    from rrfp.lab.generators.latency import LATENCY_MODELS as LATENCY_MODELS
    from rrfp.lab.generators.latency import with_latency as with_latency
    from rrfp.lab.generators.profiles import make_costs as make_costs
    from rrfp.lab.generators.profiles import microbatch_sizes as microbatch_sizes
    from rrfp.lab.generators.workloads import PROFILES as PROFILES
    from rrfp.lab.generators.workloads import Profile as Profile

_OWN = [
    "from_json",
    "read_costs",
    "to_json",
    "write_costs",
    "PLACEMENTS",
    "CostTable",
]

__all__ = sorted([*_OWN, *PUBLIC[__name__]])


def __getattr__(name: str) -> Any:
    return public_name(__name__, name)


def __dir__() -> list[str]:
    return list(__all__)
