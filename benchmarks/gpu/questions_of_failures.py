"""Questions of a device that failed. Each function prints its answer."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.gpu.questions_of_streams import GPU, event, in_thread, stream


def device_assert() -> None:
    """What an index out of range looks like to the thread that launched it and to one that waits behind it."""
    table, index = torch.zeros(4, device=GPU), torch.tensor([9], device=GPU)
    side, verdicts = stream(), []
    with torch.cuda.stream(side):
        before = event(blocking=True)
        before.record()
        _attempt("the call itself", lambda: table[index])
        after = event(blocking=True)
        _attempt("record behind it", after.record)

    def watch() -> None:
        _attempt("another thread: event before", before.synchronize)
        _attempt("another thread: event behind", after.synchronize)
        verdicts.append(True)

    with in_thread(watch):
        pass
    _attempt("the next launch", lambda: table.add_(1))
    _attempt("a fresh event", lambda: event(blocking=True).record())
    _attempt("freeing and allocating", lambda: torch.empty(1 << 24, device=GPU))
    _attempt("memory_allocated", lambda: torch.cuda.memory_allocated(GPU))


def _attempt(name: str, call: Callable[[], object]) -> None:
    began = time.perf_counter()
    try:
        call()
        text = "no error"
    except Exception as error:
        text = f"{type(error).__module__}.{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    print(f"{name}: {text} ({(time.perf_counter() - began) * 1e3:.1f} ms)", flush=True)
