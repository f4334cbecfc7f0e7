"""Waiting for the ranks of one process, which do the same at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Wait for all; when one fails, or this is cancelled, end the others first."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def all_ended(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all, also when one fails; then raise the failure of a rank that knows the cause, if there is one."""
    awaitables = list(awaitables)
    if len(awaitables) == 1:  # no task for it
        return [await awaitables[0]]
    outcomes = await asyncio.gather(*awaitables, return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if failures:
        raise next((failure for failure in failures if failure.__cause__ is not None), failures[0])
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
