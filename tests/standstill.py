"""Says whether the machine stood still: for tenths of a second and more no program ran on one of its CPUs.

A virtual machine does so when its host is busy. A test that states a time, such as how soon a killed rank is named,
then fails although the code is right. A process of its own measures it: it does nothing but wake up on every CPU, so it
is late where the machine is, and not where the tests are busy. Linux only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress

#: Seconds between two looks at the clock.
PERIOD_S = 0.02

#: Seconds by which a look must be late. Beside the whole suite nearly all are late by less than a tenth of that.
LATE_S = 0.25


class StandstillWatch:
    """Watches from its construction on, until `close` or the end of this process."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._output.read(1)  # it watches
        os.set_blocking(self._output.fileno(), False)

    def take(self) -> list[float]:
        """The standstills since the last call or `forget`, in seconds. Waits a moment for one that has just ended."""
        time.sleep(2 * PERIOD_S)
        return [float(line) for line in self._written().split()]

    def forget(self) -> None:
        """Report none of those until now."""
        self._written()

    def close(self) -> None:
        """Watch no more."""
        self._process.kill()
        self._process.wait()
        self._output.close()

    def _written(self) -> bytes:
        parts = []
        while part := self._output.read(1 << 16):
            parts.append(part)
        return b"".join(parts)


def _watch(cpu: int) -> None:
    with suppress(OSError):  # the CPU was taken away in the meantime
        os.sched_setaffinity(0, {cpu})  # of this thread alone
    before_s = time.monotonic()
    while True:
        time.sleep(PERIOD_S)
        now_s = time.monotonic()
        late_s, before_s = now_s - before_s - PERIOD_S, now_s
        if late_s > LATE_S:
            os.write(sys.stdout.fileno(), f"{late_s:.3f}\n".encode())


def _main(parent: int) -> None:
    for cpu in os.sched_getaffinity(0):
        threading.Thread(target=_watch, args=(cpu,), daemon=True).start()
    os.write(sys.stdout.fileno(), b"\n")
    while os.getppid() == parent:
        time.sleep(1)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
