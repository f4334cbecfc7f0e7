"""Says what the stub of CUDA is to do in this process, and what it has counted; see README.md, beside this file."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

#: CUDA's numbers.
OUT_OF_MEMORY, ILLEGAL_ADDRESS, ASSERT, NOT_SUPPORTED = 2, 700, 710, 801


@dataclass(frozen=True)
class Calls:
    """Of one function of CUDA's runtime.

    Attributes:
        asks_driver: whether CUDA's own may take the driver's lock; others look at what the thread knows.
        calls: how often it was called.
        locked: how often under the interpreter's lock.
        waits: how often it waited for the device.
        locked_waits: how often it did so under that lock.
    """

    asks_driver: bool
    calls: int
    locked: int
    waits: int
    locked_waits: int


class CudaStub:
    """The stub in this process.

    Raises:
        RuntimeError: if this Python runs over none.
    """

    def __init__(self) -> None:
        try:
            self._runtime: Any = importlib.import_module("cuda_stub").RUNTIME
        except ImportError:
            raise RuntimeError(
                "this Python runs over no stub of CUDA: `make gpu-test DEVICE=stub` sets one up in out/gpu-stub"
            ) from None
        self._runtime.stub_fail_kernel.argtypes = [ctypes.c_long]
        self._runtime.stub_break.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_int]
        self._runtime.stub_fail_call.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long]
        self._runtime.stub_report.argtypes = [ctypes.c_char_p, ctypes.c_long]
        self._runtime.stub_set.argtypes = [ctypes.c_char_p, ctypes.c_long]
        self._runtime.stub_report.restype = ctypes.c_long
        self._runtime.stub_live.restype = ctypes.c_long

    def fail_kernel(self, *, after: int = 1) -> None:
        """Let the ``after``-th kernel from now fail when it ends, and its device with it."""
        self._runtime.stub_fail_kernel(after)

    def break_device(self, *, device: int = 0, after_us: int = 0, error: int = ASSERT) -> None:
        """Let each call of CUDA for a device fail from a time on."""
        self._runtime.stub_break(device, after_us, error)

    def heal(self) -> None:
        """Let all devices work again, as CUDA's never do in one process."""
        self._runtime.stub_heal()

    def fail_call(self, function: str, error: int, *, after: int = 0, times: int = 1) -> None:
        """Let calls of a function fail, the first ``after`` ones excepted; nothing else fails with them."""
        self._runtime.stub_fail_call(function.encode(), error, after, times)

    def live(self, what: str) -> int:
        """How many exist: events, opened_events, blocks, opened_blocks, pinned, or streams."""
        return int(self._runtime.stub_live(what.encode()))

    def has_context(self, device: int) -> bool:
        """Whether anything has used a device, which on a GPU takes some hundred MB of its memory."""
        return bool(self._runtime.stub_has_context(device))

    @contextmanager
    def setting(self, name: str, value: int, usual: int) -> Iterator[None]:
        """Within, a setting has another value than its usual one."""
        if self._runtime.stub_set(name.encode(), value) != 0:
            raise ValueError(f"name is {name!r}, which is no setting of the stub")
        try:
            yield
        finally:
            self._runtime.stub_set(name.encode(), usual)

    def reset_counts(self) -> None:
        """Count from zero."""
        self._runtime.stub_reset_counts()

    def counts(self) -> dict[str, Calls]:
        """By function, since the process began or `reset_counts` was called."""
        text = ctypes.create_string_buffer(1 << 16)
        self._runtime.stub_report(text, len(text))
        counts = {}
        for line in text.value.decode().splitlines():
            name, asks_driver, *numbers = line.split()
            counts[name] = Calls(asks_driver == "1", *map(int, numbers))
        return counts
