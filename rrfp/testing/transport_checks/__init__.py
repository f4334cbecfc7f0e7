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

from rrfp.testing.checks import NotOfferedError, SkippedError, checks_of, run_checks
from rrfp.testing.transport_checks import data, ends, flow, frames
from rrfp.testing.transport_checks.frames import check_codec
from rrfp.testing.transport_checks.pair import Check, MakePair, Pair, PairOptions
from rrfp.testing.transport_checks.wrapped import directly, naming_losses

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

# Not those of back-pressure, nor of waiting calls: what is delivered counts as received, and is never waited for.
_DIRECTLY: tuple[Check, ...] = (
    *checks_of(data),
    flow.check_fifo_per_channel,
    flow.check_message_larger_than_the_queue,
    ends.check_refused_calls,
    ends.check_statistics,
    ends.check_close_delivers,
    ends.check_death_comes_after_messages,
    ends.check_three_ranks,
    ends.check_one_of_three_dies,
    *checks_of(frames),
)

ALL_CHECKS: tuple[Check, ...] = (
    *(naming_losses(check) for module in (data, flow, ends, frames) for check in checks_of(module)),
    *map(directly, _DIRECTLY),
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
