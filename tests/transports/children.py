"""Functions that run in a process of their own, with limits, a user or namespaces of its own."""

from __future__ import annotations

import ctypes
import errno
import struct
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
from fork_server import context

#: Of unshare(2).
NEW_MOUNTS, NEW_USERS, NEW_PIDS, NEW_NETWORK = 0x00020000, 0x10000000, 0x20000000, 0x40000000

#: What a child returns if the system does not let it do its part.
NOT_PERMITTED = "not permitted"


def in_child(function: Callable[..., Any], *arguments: Any, timeout_s: float = 30.0) -> Any:
    """The result of an importable function. What it raises fails the test; `NOT_PERMITTED` skips it."""
    forked = context()
    here, there = forked.Pipe()
    process = forked.Process(target=_run, args=(there, function, arguments))
    process.start()
    there.close()
    try:
        assert here.poll(timeout_s), f"{function.__name__} did not end within {timeout_s} s"
        failure, result = here.recv()
    except EOFError:
        process.join(5)
        raise AssertionError(f"{function.__name__} ended its process with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join(5)
        process.close()
        here.close()
    assert failure is None, failure
    if result == NOT_PERMITTED:
        pytest.skip("the system does not permit it")
    return result


def _run(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        result, failure = function(*arguments), None
    except BaseException:
        result, failure = None, traceback.format_exc()
    connection.send((failure, result))
    connection.close()


def unshare(flags: int) -> bool:
    """Move this process into new namespaces; False if it may not."""
    return bool(ctypes.CDLL(None, use_errno=True).unshare(flags) == 0)


def refuse(call: int) -> bool:
    """Have the kernel refuse a system call of this process, as a sandbox's policy does; False if it may not."""
    load, equals, answer = 0x20, 0x15, 0x06  # instructions of classic BPF
    program = [(load, 0, 0, 0), (equals, 0, 1, call), (answer, 0, 0, 0x50000 | errno.EPERM), (answer, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    header = struct.pack("@HP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    return bool(libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, header) == 0)  # no new privileges; the filter
