"""Lanes by name, for `rrfp check lane`: built in, or plugins of the entry point group ``rrfp.lanes``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rrfp.errors import ConfigError
from rrfp.plugins import Registry

if TYPE_CHECKING:
    from rrfp.testing.lane_checks import MakeLane

    #: Returns the makers of a kind of lane, by suffixes that tell them apart: one for each depth or option.
    LaneMakers = Callable[[], Mapping[str, MakeLane]]

LANES: Registry[LaneMakers] = Registry(
    "lane",
    "rrfp.lanes",
    {"thread": "rrfp.testing.lane_checks.makers:thread_lanes", "cuda": "rrfp.testing.lane_checks.makers:cuda_lanes"},
)


def lanes_named(name: str) -> Mapping[str, MakeLane]:
    """The makers of a lane; refuses unknown ones and absent devices."""
    if name not in LANES:
        raise ConfigError(
            f"lane is {name!r}, must be one of: {', '.join(LANES.names())}, or module:attribute, file.py:attribute"
        )
    return LANES.load(name)()
