"""A run of conformance checks, whatever they check, and waiting with a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from inspect import iscoroutinefunction
from types import ModuleType
from typing import Any, TypeVar


class SkippedError(Exception):
    """A check cannot look; the message names the part that it lacks. The contract is neither kept nor broken."""


class NotOfferedError(SkippedError):
    """A check is about an option that the plugin does not offer: there is nothing to keep, and nothing to report."""


T = TypeVar("T")

#: Seconds within which an event that must happen has happened.
PATIENCE_S = 20.0


class DidNotHappenError(AssertionError):
    """An event that must happen did not, within `PATIENCE_S`."""

    @classmethod
    def of(cls, event: str) -> DidNotHappenError:
        """For ``event``, a sentence."""
        return cls(f"{event}: did not happen within {PATIENCE_S:g} s")


async def soon(awaitable: Awaitable[T], event: str) -> T:
    """Await for `PATIENCE_S` at most; ``event`` is what did not happen."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await awaitable
    except TimeoutError:
        raise DidNotHappenError.of(event) from None


def checks_of(module: ModuleType) -> tuple[Any, ...]:
    """The checks that ``module`` defines, in their order: its coroutines named ``check_...``."""
    own = vars(module).items()
    return tuple(each for name, each in own if name.startswith("check_") and iscoroutinefunction(each))


async def run_checks(checks: Iterable[Callable[[T], Awaitable[None]]], make: T) -> dict[str, str]:
    """Run every check on ``make``; see `run_transport_checks`."""
    skipped = {}
    for check in checks:
        name = getattr(check, "__name__", repr(check))
        try:
            await check(make)
        except NotOfferedError:
            continue
        except SkippedError as error:
            skipped[name] = str(error)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    return skipped
