"""Prints the Python stacks of a process while a call into C keeps its interpreter's lock.

No thread of Python runs then, so a second process does it: this very file, run as a program that imports nothing but
the standard library. It expects beats. When they stay away it sends one thread after the other a signal, whose handler,
`faulthandler`'s, needs no lock and writes the stack of *its own* thread into a pipe. Two rules make that safe for a
process that was suspended (SIGSTOP, a debugger, a frozen container):

- Time counts only while the thread that beats is seen to run. One that waits for the lock wakes up every
  `sys.getswitchinterval`, 5 ms; a suspended one never does. So a suspension is not taken for a stuck call.
- A handler reads no stack but that of the thread which it interrupts. Frames of another thread change while they are
  read as soon as the lock is free, which is how `faulthandler.dump_traceback_later` crashes resumed processes.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import json
import operator
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

#: How often the second process looks at the first one, once a beat is missing.
_LOOK_S = 0.25

#: A thread has so long to begin to write its stack, and to go on; one inside the kernel may not hear the signal.
_FIRST_WRITE_S, _NEXT_WRITE_S = 0.25, 0.02

#: The number of the system call tgkill, which older libraries of C have no function for.
_TGKILL = {"x86_64": 234, "aarch64": 131, "riscv64": 131, "ppc64le": 250, "s390x": 241}.get(platform.machine())

_STDERR = 2


class LockWatch:
    """The second process, as the first one sees it. Used on the thread that beats.

    A process has one, of the first `LockWatch` that beats; once that is closed, the next one takes over.
    """

    def __init__(self, name: str, pause_s: float, limit_s: float) -> None:
        self._name = name
        self._pause_s = pause_s
        self._limit_s = limit_s
        self._beats: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def beat(self, first: int) -> None:
        """Say that the lock is free. Threads are reported in order of their start, that of ident ``first`` first.

        Raises an OSError if the second process cannot be started.
        """
        if _shared.acquire(self):
            self._start()
        if self._beats is not None:
            threads = sorted(threading.enumerate(), key=lambda thread: thread.ident != first)
            packet = json.dumps([[thread.native_id, thread.name] for thread in threads if thread.native_id])
            with suppress(OSError):  # it was killed, or is suspended
                self._beats.send(packet.encode(), socket.MSG_DONTWAIT)

    def close(self) -> None:
        """End the second process. May be called twice."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.disown()
        _shared.release(self)

    def disown(self) -> None:
        """Close what leads to the second process, which has ended, or is not this process's child."""
        if self._process is not None:
            self._process.returncode = 0  # else it would warn that it still runs
        if self._beats is not None:
            self._beats.close()
        self._beats = self._process = None

    def _start(self) -> None:
        if _TGKILL is None or sys.platform != "linux" or not sys.executable or not hasattr(os, "pidfd_open"):
            raise OSError(f"not known how on {sys.platform} {platform.machine()}")
        number, stacks = _shared.handler()
        self._beats, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        numbers = [os.getpid(), threading.get_native_id(), number, stacks, self._pause_s, self._limit_s]
        try:
            with there:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, *map(str, numbers), self._name],
                    stdin=there.fileno(),
                    stdout=subprocess.DEVNULL,
                    pass_fds=[stacks],
                    start_new_session=True,  # Ctrl-C is not for it
                )
        except OSError:
            self.disown()
            raise


class _Shared:
    """What the process has once: the handler with its pipe, which stay forever, and one `LockWatch` that works.

    A signal that is still on its way would end the process if its handler were gone.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child, too, nothing of it is there."""
        self._lock = threading.Lock()
        self._owner: LockWatch | None = None
        self._handler: tuple[int, int] | None = None

    def acquire(self, watch: LockWatch) -> bool:
        with self._lock:
            is_free = self._owner is None
            if is_free:
                self._owner = watch
        return is_free

    def release(self, watch: LockWatch) -> None:
        with self._lock:
            if self._owner is watch:
                self._owner = None

    def after_fork(self) -> None:
        """In a forked child; the second process is its parent's."""
        if self._owner is not None:
            self._owner.disown()
        self.forget()

    def handler(self) -> tuple[int, int]:
        """The signal that writes a thread's stack, and the end of the pipe at which to read it."""
        with self._lock:
            if self._handler is None:
                number = _unused_signal()
                stacks, to = os.pipe()
                os.set_blocking(to, False)
                faulthandler.register(number, file=to, all_threads=False)
                self._handler = number, stacks
            return self._handler


def _unused_signal() -> int:
    """A signal that nothing in this process handles or ignores; raises an OSError if there is none."""
    lines = Path("/proc/self/status").read_text().splitlines()
    masks = {line.partition(":")[0]: line.partition(":")[2] for line in lines}
    if not masks.keys() >= (names := {"SigCgt", "SigIgn", "SigBlk"}):  # as in a sandbox with a kernel of its own
        raise OSError("/proc does not say which signals are in use")
    used = functools.reduce(operator.or_, (int(masks[name], 16) for name in names))
    for number in range(signal.SIGRTMAX, signal.SIGRTMIN, -1):
        if not used >> (number - 1) & 1:
            return number
    raise OSError("every real-time signal is in use")


_shared = _Shared()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_shared.after_fork)


# In the second process.


def main(pid: int, thread: int, number: int, stacks: int, pause_s: float, limit_s: float, name: str) -> None:
    """Watch process ``pid``, whose thread of native id ``thread`` beats, until it or the connection has ended."""
    try:
        ended = os.pidfd_open(pid)
    except OSError:  # it has ended, or the kernel does not permit this
        return
    if os.getppid() == pid:
        _watch(Path(f"/proc/{pid}/task/{thread}/status"), ended, pause_s, limit_s, (pid, number, stacks, name))


def _watch(status: Path, ended: int, pause_s: float, limit_s: float, process: tuple[int, int, int, str]) -> None:
    beats = socket.socket(fileno=os.dup(0))
    threads: Sequence[tuple[int, str]] = ()
    wait_s: float | None = None
    missed_s = looked_s = 0.0
    switches: int | None = None
    while not (ready := _ready(ended, beats.fileno(), timeout_s=wait_s)) or ended not in ready:
        if ready:
            if not (packet := beats.recv(1 << 20)):
                return
            # The first look comes when the next beat is late. That time counts: more must follow in which it is awake.
            missed_s = wait_s = 1.5 * pause_s
            threads, switches = json.loads(packet), None
            continue
        now_s, before, switches = time.monotonic(), switches, _switches(status)
        if before is not None and switches > before:
            missed_s += min(now_s - looked_s, 2 * _LOOK_S)  # more may be a suspension of both processes
        looked_s, wait_s = now_s, _LOOK_S
        if missed_s >= limit_s:
            _print(beats, threads, limit_s, process)
            wait_s = None  # until a beat


def _switches(status: Path) -> int:
    """How often a thread has given up its core; 0 if it has ended."""
    with suppress(OSError):
        return sum(int(line.split()[1]) for line in status.read_text().splitlines() if "ctxt_switches:" in line)
    return 0


def _print(
    beats: socket.socket, threads: Sequence[tuple[int, str]], limit_s: float, process: tuple[int, int, int, str]
) -> None:
    pid, number, stacks, name = process
    libc = ctypes.CDLL(None)
    text = [
        f"{name} (pid {pid}): a call has kept the interpreter's lock for more than {limit_s:.3g} s; "
        "the Python stacks of its threads, the innermost call first:"
    ]
    for thread, title in threads:
        for _ in _written(stacks, 0.0):  # what came late
            pass
        if _ready(beats.fileno(), timeout_s=0.0):  # it goes on, or has ended
            break
        libc.syscall(_TGKILL, pid, thread, number)
        stack = b"".join(_written(stacks, _FIRST_WRITE_S)).decode(errors="replace")
        text += [f"thread {title}:", stack.partition("\n")[2].rstrip() or "  (it does not answer)"]
    if len(text) > 1:
        with suppress(OSError):  # its reader is gone
            os.write(_STDERR, ("\n".join(text) + "\n").encode())


def _written(stacks: int, first_s: float) -> Iterator[bytes]:
    timeout_s = first_s
    while _ready(stacks, timeout_s=timeout_s):
        yield os.read(stacks, 1 << 16)
        timeout_s = _NEXT_WRITE_S if first_s else 0.0


def _ready(*files: int, timeout_s: float | None) -> list[int]:
    """Those that can be read; waits forever if there is no time."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s)]


if __name__ == "__main__":
    _pid, _thread, _number, _stacks = map(int, sys.argv[1:5])
    main(_pid, _thread, _number, _stacks, float(sys.argv[5]), float(sys.argv[6]), sys.argv[7])
