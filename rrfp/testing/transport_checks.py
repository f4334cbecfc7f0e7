"""The conformance suite for transports: does an implementation keep the contract of `rrfp.transports.base`?

For plugin authors; needs no test framework. Write a *maker*, an async context manager that yields a started `Pair` of
your transports, and run::

    @asynccontextmanager
    async def make_pair(options: PairOptions) -> AsyncIterator[Pair]: ...

    asyncio.run(run_transport_checks(make_pair))

or hand each of `ALL_CHECKS` to your test runner. A check raises AssertionError with a sentence that says what broke, or
SkippedError where the pair does not let it look: without `Pair.inject`, `Pair.silence` or `Pair.third`.
"""

from __future__ import annotations

from rrfp.testing import (
    transport_check_data,
    transport_check_ends,
    transport_check_flow,
    transport_check_frames,
    transport_check_peers,
)
from rrfp.testing.skipped import SkippedError
from rrfp.testing.transport_pair import Check, MakePair, Pair, PairOptions

__all__ = ["ALL_CHECKS", "Check", "MakePair", "Pair", "PairOptions", "SkippedError", "run_transport_checks"]

#: Every check, in an order in which the first failure tells most.
ALL_CHECKS: tuple[Check, ...] = (
    *transport_check_data.CHECKS,
    *transport_check_flow.CHECKS,
    *transport_check_ends.CHECKS,
    *transport_check_peers.CHECKS,
    *transport_check_frames.CHECKS,
)


async def run_transport_checks(make_pair: MakePair) -> dict[str, str]:
    """Run every check, one after the other.

    Returns:
        The checks that did not look, by name, each with what it lacked.

    Raises:
        AssertionError: of the first check that failed, with its name.
    """
    skipped = {}
    for check in ALL_CHECKS:
        try:
            await check(make_pair)
        except SkippedError as error:
            skipped[check.__name__] = str(error)
        except AssertionError as error:
            raise AssertionError(f"{check.__name__}: {error}") from error
    return skipped
