"""Questions of a device that failed. Each function prints its answer."""

from __future__ import annotations

import subprocess
import sys
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


_FREEING = """
import sys, torch
side, noted = torch.cuda.Stream(), [torch.ones(1 << 20, device="cuda") for _ in range(2)]
for tensor in noted:
    tensor.record_stream(side)
del tensor
with torch.cuda.stream(side):
    torch.cuda._sleep(3_000_000_000)
if sys.argv[1] == "free before":
    noted.clear()
table, index = torch.zeros(4, device="cuda"), torch.tensor([9], device="cuda")
table[index]
try:
    torch.cuda.synchronize()
except Exception as error:
    print(type(error).__name__, flush=True)
noted.clear()
for _ in range(2):
    try:
        torch.empty(1 << 20, device="cuda")
        print("allocated", flush=True)
    except Exception as error:
        print("allocating:", type(error).__name__, flush=True)
"""


def freeing() -> None:
    """Whether a process outlives that noted memory is freed behind an assert, or was freed before it."""
    for when in ("free before", "free behind"):
        command = [sys.executable, "-u", "-c", _FREEING, when]
        done = subprocess.run(command, capture_output=True, text=True, timeout=25, check=False)
        print(f"{when}: {', '.join(done.stdout.split(chr(10)))}exit code {done.returncode}")
