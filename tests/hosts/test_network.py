"""The wire between hosts does what the other tests here rely on."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hosts.network import Host, Network, in_thread, obstacle

COUNT = 60

#: A number that is not counted.
PROBE = 255


@pytest.fixture(scope="module", autouse=True)
def _hosts_can_be_made() -> None:
    if reason := obstacle():
        pytest.skip(reason)


@contextmanager
def udp(host: Host, *, ipv6: bool = False) -> Iterator[socket.socket]:
    """A socket on a host, which everybody may use."""
    made: list[socket.socket] = []

    def make() -> None:
        host.enter()
        made.append(socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET, socket.SOCK_DGRAM))
        made[0].bind((host.ipv6 if ipv6 else host.ipv4, 0))

    in_thread(make)
    with made[0]:
        yield made[0]


def reach(sender: socket.socket, receiver: socket.socket) -> None:
    """Send until something arrives: an interface takes IPv6 packets only a moment after it is up."""
    receiver.settimeout(0.1)
    for _ in range(100):
        sender.sendto(bytes([PROBE]), receiver.getsockname())
        try:
            receiver.recv(1)
            return
        except TimeoutError:
            continue
    raise AssertionError("nothing arrives")


def passed(sender: socket.socket, receiver: socket.socket, quiet_s: float = 5.0) -> list[int]:
    """Send `COUNT` numbers; those that arrive, in their order, up to a silence."""
    for number in range(COUNT):
        sender.sendto(bytes([number]), receiver.getsockname())
    receiver.settimeout(quiet_s)
    arrived: list[int] = []
    try:
        while len(arrived) < COUNT:
            if (number := receiver.recv(1)[0]) != PROBE:
                arrived.append(number)
    except TimeoutError:
        pass
    return arrived


@pytest.mark.parametrize("ipv6", [False, True])
def test_a_good_wire_carries_everything_in_order(ipv6: bool) -> None:
    with Network(3) as network, udp(network.hosts[0], ipv6=ipv6) as one, udp(network.hosts[2], ipv6=ipv6) as other:
        reach(one, other)
        reach(other, one)
        assert passed(one, other) == list(range(COUNT))
        assert passed(other, one) == list(range(COUNT))


def test_packets_take_their_time_and_overtake() -> None:
    slow = Network(2, delay_s=0.05, jitter_s=0.05)
    with slow as network, udp(network.hosts[0]) as one, udp(network.hosts[1]) as other:
        since = time.monotonic()
        arrived = passed(one, other)
        assert time.monotonic() - since > 0.05
        assert sorted(arrived) == list(range(COUNT))
        assert arrived != list(range(COUNT))


def test_some_packets_are_lost() -> None:
    with Network(2, loss=0.3) as network, udp(network.hosts[0]) as one, udp(network.hosts[1]) as other:
        assert COUNT / 3 < len(passed(one, other, 1.0)) < COUNT


def test_ways_are_cut_one_by_one_and_mended() -> None:
    with Network(2) as network, udp(network.hosts[0]) as one, udp(network.hosts[1]) as other:
        network.cut((0, 1))
        assert passed(one, other, 0.2) == []
        assert passed(other, one) == list(range(COUNT))
        network.isolate([1])
        assert passed(other, one, 0.2) == []
        network.cut()
        assert passed(one, other) == list(range(COUNT))
