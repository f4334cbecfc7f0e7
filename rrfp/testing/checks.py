"""A run of conformance checks, whatever they check."""

from collections.abc import Awaitable, Callable, Iterable
from inspect import iscoroutinefunction
from types import ModuleType
from typing import Any, TypeVar


class SkippedError(Exception):
    """A check cannot look; the message names the part that it lacks. The contract is neither kept nor broken."""


class NotOfferedError(SkippedError):
    """A check is about an option that the plugin does not offer: there is nothing to keep, and nothing to report."""


T = TypeVar("T")


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
