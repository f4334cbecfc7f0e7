"""Coroutines on the loop of another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from rrfp.pipeline.loop_thread import LoopThread

T = TypeVar("T")


def submit(thread: LoopThread, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run ``coroutine`` on the loop of ``thread``."""
    return asyncio.run_coroutine_threadsafe(coroutine, thread.loop)
