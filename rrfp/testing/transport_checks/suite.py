"""All transport checks in order, and a run of them."""

from __future__ import annotations

from rrfp.testing.checks import run_checks
from rrfp.testing.transport_checks import data, direct, ends, flow, frames, peers
from rrfp.testing.transport_checks.pair import Check, MakePair

ALL_CHECKS: tuple[Check, ...] = (
    *data.CHECKS,
    *flow.CHECKS,
    *ends.CHECKS,
    *peers.CHECKS,
    *frames.CHECKS,
    *direct.CHECKS,
)
"""Every check, the simplest first, so that the first failure is the most helpful."""


async def run_transport_checks(make_pair: MakePair) -> dict[str, str]:
    """Run every check, one after the other.

    Args:
        make_pair: starts the transports under test; called once for each check.

    Returns:
        The skipped checks by name, each with the part that it lacked.

    Raises:
        AssertionError: of the first check that failed, with its name.
    """
    return await run_checks(ALL_CHECKS, make_pair)
