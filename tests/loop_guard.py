"""Finds calls that block an event loop: the blocking call itself, whatever time it took.

Two detectors, both indifferent to how busy the machine is. *Waits*: the functions by which Python code waits (sleep,
locks' conditions, joins, sockets, child processes, plain zmq, torch's stores and collectives) are wrapped for the whole
session, and a call is a violation when its thread is running a loop and the call may wait. *Work*: a loop callback that
burns more than `CPU_LIMIT_S` of its own thread's CPU time, garbage collection aside. `install` must run before the
code under test is imported, so that `from time import sleep` binds the wrapper.

Not seen: a contended bare `Lock.acquire`, file I/O, and work on uvloop (whose callbacks are not Python's).
"""

from __future__ import annotations

import asyncio
import asyncio.events
import functools
import gc
import importlib
import ipaddress
import multiprocessing.connection
import multiprocessing.process
import os
import select
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import zmq

#: Seconds of CPU one callback may use. Generous: a callback should take far under a millisecond.
CPU_LIMIT_S = 0.5

#: Says whether a call with these arguments may wait.
MayWait = Callable[..., bool]

_violations: list[str] = []
_gc_started_s: dict[int, float] = {}
_gc_spent_s: dict[int, float] = {}


def take_violations() -> list[str]:
    """Return what was found since the last call, each with its stack, and forget it."""
    found = _violations[:]
    del _violations[: len(found)]
    return found


def _record(what: str) -> None:
    stack = "".join(traceback.format_stack()[-9:-2])
    _violations.append(f"{what} on the event loop of thread {threading.current_thread().name!r}\n{stack}")


def _always(*_: Any, **__: Any) -> bool:
    return True


def _timeout_at(index: int) -> MayWait:
    """The call waits unless its timeout, the argument at `index` (self counts), is zero or negative."""

    def may_wait(*args: Any, **kwargs: Any) -> bool:
        timeout = kwargs.get("timeout", args[index] if len(args) > index else None)
        return timeout is None or timeout > 0

    return may_wait


def _sleeps(seconds: float) -> bool:
    return seconds > 0


def _condition_waits(_: threading.Condition, timeout: float | None = None) -> bool:
    if timeout is not None and timeout <= 0:
        return False
    # Thread.start waits for the new thread to exist: microseconds, and there is no other way to start one.
    stack = traceback.extract_stack(limit=6)
    return not any(frame.name == "start" and frame.filename == threading.__file__ for frame in stack)


def _join_waits(thread: threading.Thread, timeout: float | None = None) -> bool:
    target = getattr(thread, "_target", None)
    if getattr(target, "__name__", "") == "_do_shutdown":  # a loop closing its own executor, which it awaited
        return False
    return thread.is_alive() and (timeout is None or timeout > 0)


def _process_waits(process: subprocess.Popen[Any], timeout: float | None = None) -> bool:
    return process.poll() is None and (timeout is None or timeout > 0)


def _waitpid_waits(_: int, options: int) -> bool:
    return not options & os.WNOHANG


def _select_waits(*args: Any) -> bool:
    return len(args) < 4 or args[3] is None or args[3] > 0


def _socket_waits(sock: socket.socket, *_: Any, **__: Any) -> bool:
    return sock.gettimeout() != 0


def _resolves(host: str | bytes | None, *_: Any, **__: Any) -> bool:
    try:
        ipaddress.ip_address(host.decode() if isinstance(host, bytes) else host or "127.0.0.1")
    except ValueError:
        return True
    return False


def _zmq_waits(flags_at: int) -> MayWait:
    def may_wait(*args: Any, **kwargs: Any) -> bool:
        flags = kwargs.get("flags", args[flags_at] if len(args) > flags_at else 0)
        return not int(flags) & int(zmq.NOBLOCK)

    return may_wait


def _zmq_polls(*args: Any, **kwargs: Any) -> bool:
    timeout = kwargs.get("timeout", args[1] if len(args) > 1 else None)
    return timeout is None or timeout != 0  # negative is for ever


def _waits() -> list[tuple[Any, str, MayWait]]:
    """Every wrapped function: its owner, its name, and when a call of it may wait."""
    table: list[tuple[Any, str, MayWait]] = [
        (time, "sleep", _sleeps),
        (threading.Condition, "wait", _condition_waits),  # Event, Semaphore, Queue and Future wait through it
        (threading.Thread, "join", _join_waits),
        (subprocess.Popen, "wait", _process_waits),
        (os, "waitpid", _waitpid_waits),
        (multiprocessing.process.BaseProcess, "join", _timeout_at(1)),
        (multiprocessing.connection, "wait", _timeout_at(1)),
        (multiprocessing.connection.Connection, "recv", _always),
        (multiprocessing.connection.Connection, "recv_bytes", _always),
        (select, "select", _select_waits),
        (socket, "getaddrinfo", _resolves),
        (zmq.Socket, "send", _zmq_waits(2)),
        (zmq.Socket, "recv", _zmq_waits(1)),
        (zmq.Socket, "poll", _zmq_polls),
        (zmq.Poller, "poll", _zmq_polls),
        (importlib.import_module("builtins"), "input", _always),
    ]
    socket_calls = ("accept", "connect", "recv", "recv_into", "recvfrom", "send", "sendall", "sendto")
    table += [(socket.socket, name, _socket_waits) for name in socket_calls]
    return table + _torch_waits()


def _torch_waits() -> list[tuple[Any, str, MayWait]]:
    import torch

    table: list[tuple[Any, str, MayWait]] = [
        (torch.cuda, "synchronize", _always),
        (torch.cuda.Event, "synchronize", _always),
        (torch.cuda.Stream, "synchronize", _always),
    ]
    distributed: Any = importlib.import_module("torch.distributed")
    if distributed.is_available():
        # A pybind class keeps what is set on it; a subclass such as TCPStore inherits the wrapper.
        table += [
            (distributed.Store, "get", _always),
            (distributed.Store, "wait", _always),
            (distributed.TCPStore, "__init__", _always),
            (distributed.Work, "wait", _always),
            (distributed, "barrier", _always),
        ]
    return table


def _wrap_wait(owner: Any, name: str, may_wait: MayWait) -> None:
    original = getattr(owner, name)
    label = f"{owner.__name__}.{name}"
    running_loop = asyncio._get_running_loop

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if running_loop() is not None and may_wait(*args, **kwargs):
            _record(f"{label} blocks")
        return original(*args, **kwargs)

    setattr(owner, name, guarded)


def _on_gc(phase: str, _: dict[str, int]) -> None:
    thread, now_s = threading.get_ident(), time.thread_time()
    if phase == "start":
        _gc_started_s[thread] = now_s
    else:
        started_s = _gc_started_s.pop(thread, now_s)
        _gc_spent_s[thread] = _gc_spent_s.get(thread, 0.0) + now_s - started_s


def _wrap_work() -> None:
    original = asyncio.events.Handle._run

    def _run(self: asyncio.Handle) -> None:
        thread = threading.get_ident()
        before_s = time.thread_time() - _gc_spent_s.get(thread, 0.0)
        original(self)
        used_s = time.thread_time() - _gc_spent_s.get(thread, 0.0) - before_s
        if used_s > CPU_LIMIT_S:
            _violations.append(f"a callback used {used_s:.2f} s of CPU on the event loop: {self!r}")

    asyncio.events.Handle._run = _run  # type: ignore[method-assign]
    gc.callbacks.append(_on_gc)


def install() -> None:
    """Wrap everything, once for the process."""
    for owner, name, may_wait in _waits():
        _wrap_wait(owner, name, may_wait)
    _wrap_work()
