"""Hosts: network namespaces joined by a wire in user space, which delays, loses, reorders and cuts.

Every host has one interface, a tun device; the wire reads the packets of all and passes them on. Nothing has a name or
a file: a namespace lives as long as its descriptor, and everything ends with the test process.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from random import Random
from types import TracebackType

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_MTU = 9000
_TUN = "/dev/net/tun"

#: A direction: from host to host.
Way = tuple[int, int]


def obstacle() -> str:
    """Why this process can make no hosts; empty if it can."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, this is {sys.platform}"
    try:
        in_thread(_probe)
    except (OSError, subprocess.SubprocessError) as error:
        return f"this process may not make network namespaces with tun devices: {error}"
    return ""


def enter(namespace: str) -> None:
    """Move this thread, and those that it will start, to the network namespace at a path."""
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", descriptor, _CLONE_NEWNET)
    finally:
        os.close(descriptor)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def in_thread(function: Callable[[], None]) -> None:
    """Run ``function`` in a thread that ends with it: it may leave the namespace of the process."""
    raised = list[BaseException]()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="host-setup")
    thread.start()
    thread.join()
    for error in raised:
        raise error


def _probe() -> None:
    _call("unshare", _CLONE_NEWNET)
    os.close(_open_tun())
    _ip("link", "set", "lo", "up")


def _open_tun() -> int:
    """The device ``wire0`` of this thread's namespace."""
    descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", b"wire0", _IFF_TUN | _IFF_NO_PI))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@dataclass
class Host:
    """One host.

    Attributes:
        index: its number.
        namespace: a path for `enter`.
    """

    index: int
    namespace: str = ""
    _descriptors: list[int] = field(default_factory=list)

    @property
    def ipv4(self) -> str:
        """Its address."""
        return f"10.77.0.{self.index + 1}"

    @property
    def ipv6(self) -> str:
        """Its other address."""
        return f"fd77::{self.index + 1:x}"

    def make(self) -> int:
        """Make the namespace; returns the wire's end of its interface. In a thread of its own."""
        _call("unshare", _CLONE_NEWNET)
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._descriptors.append(own)
        self.namespace = f"/proc/{os.getpid()}/fd/{own}"
        tun = _open_tun()
        self._descriptors.append(tun)
        _ip("link", "set", "lo", "up")
        _ip("link", "set", "wire0", "mtu", str(_MTU), "up")
        _ip("addr", "add", f"{self.ipv4}/24", "dev", "wire0")
        _ip("addr", "add", f"{self.ipv6}/64", "dev", "wire0", "nodad")
        return tun

    def enter(self) -> None:
        """See `enter`."""
        enter(self.namespace)

    def close(self) -> None:
        """Drop the namespace: it ends with its last process."""
        while self._descriptors:
            os.close(self._descriptors.pop())


class Network:
    """So many hosts, and the wire between them.

    Args:
        count: of the hosts.
        delay_s: what every packet takes.
        jitter_s: up to so much more, drawn for each packet: later ones overtake.
        loss: the share of packets that are lost.
    """

    def __init__(self, count: int, delay_s: float = 0.0, jitter_s: float = 0.0, loss: float = 0.0) -> None:
        self.hosts = [Host(index) for index in range(count)]
        self._delay_s, self._jitter_s, self._loss = delay_s, jitter_s, loss
        self._cut: frozenset[Way] = frozenset()
        self._random = Random(0)
        self._tuns: list[int] = []
        self._late: list[tuple[float, int, int, bytes]] = []
        self._passed = 0
        self._stop_read, self._stop_write = os.pipe()
        self._wire = threading.Thread(target=self._carry, name="wire")

    def __enter__(self) -> Network:
        try:
            for host in self.hosts:
                in_thread(lambda host=host: self._tuns.append(host.make()))  # type: ignore[misc]
            self._wire.start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.write(self._stop_write, b"x")
        self._wire.join()
        self._close()

    def _close(self) -> None:
        for host in self.hosts:
            host.close()
        os.close(self._stop_read)
        os.close(self._stop_write)

    def cut(self, *ways: Way) -> None:
        """From now on lose all packets on these ways, and on no others."""
        self._cut = frozenset(ways)

    def delay(self, seconds: float) -> None:
        """From now on every packet takes so long."""
        self._delay_s = seconds

    def isolate(self, apart: Collection[int]) -> None:
        """Cut both ways between some hosts and all others."""
        every = [(a, b) for a in range(len(self.hosts)) for b in range(len(self.hosts))]
        self.cut(*((a, b) for a, b in every if (a in apart) != (b in apart)))

    def _carry(self) -> None:
        tuns: Sequence[int] = self._tuns
        while True:
            timeout = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            readable, _, _ = select.select([self._stop_read, *tuns], [], [], timeout)
            if self._stop_read in readable:
                return
            for source, tun in enumerate(tuns):
                if tun in readable:
                    self._read(source, tun)
            while self._late and self._late[0][0] <= time.monotonic():
                *_, target, packet = heapq.heappop(self._late)
                self._write(target, packet)

    def _read(self, source: int, tun: int) -> None:
        try:
            packet = os.read(tun, _MTU + 64)
        except BlockingIOError:
            return
        target = _target(packet)
        if not 0 <= target < len(self.hosts) or (source, target) in self._cut or self._random.random() < self._loss:
            return
        delay_s = self._delay_s + self._random.random() * self._jitter_s
        if delay_s == 0:
            self._write(target, packet)
        else:
            self._passed += 1
            heapq.heappush(self._late, (time.monotonic() + delay_s, self._passed, target, packet))

    def _write(self, target: int, packet: bytes) -> None:
        try:
            os.write(self._tuns[target], packet)
        except OSError:  # its queue is full: a packet is lost
            return


def _target(packet: bytes) -> int:
    """The host that a packet is for; -1 if it is for none, as multicast is."""
    version = packet[0] >> 4
    address = packet[16:20] if version == 4 else packet[24:40]
    known = address[:3] == b"\x0a\x4d\x00" if version == 4 else address[:2] == b"\xfd\x77"
    return address[-1] - 1 if known else -1
