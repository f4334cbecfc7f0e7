"""The conformance suite for transports: it checks an implementation against the contract of `rrfp.transports.base`.

For plugin authors; needs no test framework. Write a *maker*, an async context manager that yields a started `Pair` of
your transports, and run::

    @asynccontextmanager
    async def make_pair(options: PairOptions) -> AsyncIterator[Pair]: ...

    asyncio.run(run_transport_checks(make_pair))

or pass each of `ALL_CHECKS` to your test runner. A check raises AssertionError with one sentence about the breach, or
SkippedError where the pair lacks `Pair.inject`, `Pair.silence` or `Pair.third`; and its kind NotOfferedError where the
check is about an option, such as `deliver_to`, that the transport does not offer.
"""

from __future__ import annotations

from rrfp.testing.checks import NotOfferedError, SkippedError
from rrfp.testing.transport_checks.frames import check_codec
from rrfp.testing.transport_checks.pair import Check, MakePair, Pair, PairOptions
from rrfp.testing.transport_checks.suite import ALL_CHECKS, run_transport_checks

__all__ = [
    "ALL_CHECKS",
    "Check",
    "MakePair",
    "NotOfferedError",
    "Pair",
    "PairOptions",
    "SkippedError",
    "check_codec",
    "run_transport_checks",
]
