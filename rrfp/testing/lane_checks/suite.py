"""All lane checks in order, and a run of them."""

from __future__ import annotations

from rrfp.testing.checks import run_checks
from rrfp.testing.lane_checks import calls, device_work, offers
from rrfp.testing.lane_checks.subject import Check, MakeLane

ALL_CHECKS: tuple[Check, ...] = (*calls.CHECKS, *offers.CHECKS, *device_work.CHECKS)
"""Every check, the simplest first, so that the first failure is the most helpful."""


async def run_lane_checks(make_lane: MakeLane) -> dict[str, str]:
    """Run every check, one after the other.

    Args:
        make_lane: starts the lane under test; called once for each check.

    Returns:
        The skipped checks by name, each with the part that it lacked.

    Raises:
        AssertionError: of the first check that failed, with its name.
    """
    return await run_checks(ALL_CHECKS, make_lane)
