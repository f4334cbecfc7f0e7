"""The conformance suite for transports: does an implementation keep the contract of `rrfp.transports.base`?

For plugin authors; needs no test framework. Write a *maker*, an async context manager that yields a started `Pair` of
your transports, and run::

    @asynccontextmanager
    async def make_pair(options: PairOptions) -> AsyncIterator[Pair]: ...

    asyncio.run(run_transport_checks(make_pair))

or hand each of `ALL_CHECKS` to your test runner. A check raises AssertionError with a sentence that says what broke.
"""

from __future__ import annotations

from rrfp.testing import transport_check_data, transport_check_ends, transport_check_flow, transport_check_frames
from rrfp.testing.transport_pair import Check, MakePair, Pair, PairOptions

__all__ = ["ALL_CHECKS", "Check", "MakePair", "Pair", "PairOptions", "run_transport_checks"]

#: Every check, in an order in which the first failure tells most.
ALL_CHECKS: tuple[Check, ...] = (
    *transport_check_data.CHECKS,
    *transport_check_flow.CHECKS,
    *transport_check_ends.CHECKS,
    *transport_check_frames.CHECKS,
)


async def run_transport_checks(make_pair: MakePair) -> None:
    """Run every check, one after the other.

    Raises:
        AssertionError: of the first check that failed, with its name.
    """
    for check in ALL_CHECKS:
        try:
            await check(make_pair)
        except AssertionError as error:
            raise AssertionError(f"{check.__name__}: {error}") from error
