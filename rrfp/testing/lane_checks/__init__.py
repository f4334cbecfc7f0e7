"""The conformance suite for lanes: it checks an implementation against the contract of `rrfp.compute.lanes.base`.

For plugin authors; needs no test framework. Write a *maker*, an async context manager that yields a started lane as a
`Subject`, and run::

    @asynccontextmanager
    async def make_lane() -> AsyncIterator[Subject]: ...

    asyncio.run(run_lane_checks(make_lane))

or pass each of `ALL_CHECKS` to your test runner. `made_by` is the maker for a factory as the option ``lane=`` takes it.
A check raises AssertionError with one sentence about the breach, or SkippedError where the subject lacks a part that
the check needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rrfp.laboratory import PUBLIC
from rrfp.lazy_names import lazy_names
from rrfp.testing.checks import SkippedError, checks_of, run_checks
from rrfp.testing.lane_checks import calls, device_work
from rrfp.testing.lane_checks.makers import made_by
from rrfp.testing.lane_checks.subject import Check, MakeLane, Subject

# For type checkers: `as` marks a public name.
if TYPE_CHECKING:
    from rrfp.lab.lane_makers import double_lane as double_lane

__all__ = [
    "ALL_CHECKS",
    "Check",
    "MakeLane",
    "SkippedError",
    "Subject",
    "double_lane",
    "made_by",
    "run_lane_checks",
]

ALL_CHECKS: tuple[Check, ...] = (*checks_of(calls), *checks_of(device_work))
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


_names, __getattr__, _dir = lazy_names(__name__, PUBLIC[__name__])
