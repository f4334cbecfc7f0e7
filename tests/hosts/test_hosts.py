"""Ranks on hosts of their own: a good network, a slow one, and each way in which one can break."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
from batches import long
from fork_server import fork_server
from hosts.network import Network, Way, obstacle
from hosts.ranks import Ranks, limits_for_ever, losses_and_listeners, steps_for_ever
from runtime.children import End

__all__ = ["fork_server"]

#: For how long a peer may be silent here, in seconds; a user's is 10.
PATIENCE_S = 1.5

#: The most that a rank needs beyond that to notice, to abort and to raise, in seconds, on a busy machine.
SLACK_S = 6.0

#: How connections between hosts are protected.
SECURITY: dict[str, dict[str, Any]] = {"secret": {"secret": 32 * "s"}, "plain": {"allow_insecure": True}}

secured = pytest.mark.parametrize("security", ["secret", long("plain")])
pytestmark = pytest.mark.allow_blocking("the ranks are processes, and no loop runs here")


@pytest.fixture(scope="module", autouse=True)
def _hosts_can_be_made() -> None:
    if reason := obstacle():
        pytest.skip(reason)


def ranks(network: Network, program: Any, security: str, **options: Any) -> Ranks:
    fields = {"patience": PATIENCE_S, "connect_timeout": 20.0, **SECURITY[security], **options}
    return Ranks(network, program, **fields)


@secured
@pytest.mark.parametrize(("count", "ipv6"), [(2, False), (2, True), long(3, False), long(3, True)])
def test_hosts_train_together_and_listen_on_their_own_interface(count: int, ipv6: bool, security: str) -> None:
    with Network(count) as network, ranks(network, losses_and_listeners, security, ipv6=ipv6) as running:
        ends = [running.end(rank) for rank in range(count)]
        assert [end.error for end in ends] == [""] * count, ends
        assert len({str(end.value[0]) for end in ends}) == 1
        for host, end in zip(network.hosts, ends, strict=True):
            addresses = {address for address, port in end.value[1] if port != 29500}  # the store, which is torch's
            assert addresses == {host.ipv6 if ipv6 else host.ipv4}
        running.join(time.monotonic())


def test_without_leave_no_host_listens_unprotected() -> None:
    with Network(2) as network, Ranks(network, steps_for_ever, connect_timeout=20.0) as running:
        for host, rank in zip(network.hosts, range(2), strict=True):
            end = running.end(rank)
            assert end.error == "ConfigError", end
            assert host.ipv4 in end.text
            assert "allow_insecure=True" in end.text


@secured
@pytest.mark.parametrize(
    "wire",
    [
        {"delay_s": 0.04},
        long({"delay_s": 0.02, "jitter_s": 0.04}),
        long({"loss": 0.02}),
        {"delay_s": 0.005, "jitter_s": 0.02, "loss": 0.01},
    ],
    ids=str,
)
def test_a_slow_wire_that_loses_and_reorders_is_no_failure(wire: dict[str, float], security: str) -> None:
    with Network(2, **wire) as network, ranks(network, steps_for_ever, security, patience=5.0) as running:
        running.wait_for_steps()
        before = running.steps_of(0)
        running.wait_for_more_steps(before)


@pytest.mark.long
def test_a_limit_follows_a_slow_wire_and_falls_when_it_is_fast_again() -> None:
    seconds = 0.05  # what a forward sleeps, and so about a period
    with Network(2) as network, ranks(network, limits_for_ever, "secret", limit="auto", seconds=seconds) as running:

        def wait_for(is_reached: Callable[[tuple[int, ...]], bool]) -> None:
            for _ in range(12):
                slots = running.hear(0)
                assert not isinstance(slots, End), slots
                if is_reached(slots):
                    return
            raise AssertionError(f"after 12 steps stages may hold {slots}")

        network.delay(4 * seconds)
        wait_for(lambda slots: slots[0] >= 2 + 4)  # of a round trip of eight periods: this machine may be slow
        network.delay(0.0)
        wait_for(lambda slots: slots[0] <= 4)


@secured
def test_a_cut_shorter_than_the_patience_is_no_failure(security: str) -> None:
    with Network(2) as network, ranks(network, steps_for_ever, security, patience=5.0) as running:
        running.wait_for_steps()
        network.isolate([1])
        time.sleep(0.5)  # the cut's length
        network.cut()
        running.wait_for_more_steps(running.steps_of(0))


def both(a: int, b: int) -> tuple[Way, Way]:
    return (a, b), (b, a)


def around(*apart: int) -> tuple[Way, ...]:
    """Both ways between some of three hosts and the others."""
    return tuple((a, b) for a in range(3) for b in range(3) if (a in apart) != (b in apart))


#: Ways that are cut between three hosts, and for each rank the stages that it may blame: those beyond a cut, and, where
#: the others still reach it, those that they blame.
CUTS: dict[str, tuple[Sequence[Way], Sequence[Collection[int]]]] = {
    "all": ([*both(0, 1), *both(1, 2), *both(0, 2)], [{1, 2}, {0, 2}, {0, 1}]),
    "host 2 apart": (around(2), [{2}, {2}, {0, 1}]),
    "host 0 apart": (around(0), [{1, 2}, {0}, {0}]),
    "link 0-1": (both(0, 1), [{0, 1}] * 3),
    "link 0-2": (both(0, 2), [{0, 2}] * 3),
    "one way, 0 to 1": ([(0, 1)], [{0, 1}] * 3),
    "one way, into 1": ([(0, 1), (2, 1)], [{0, 1, 2}] * 3),
}

OFTEN = ("host 2 apart", "one way, 0 to 1")


@secured
@pytest.mark.parametrize("cut", [cut if cut in OFTEN else long(cut) for cut in CUTS])
def test_a_cut_ends_the_job_on_every_side_and_names_a_rank_beyond_it(cut: str, security: str) -> None:
    ways, blamed = CUTS[cut]
    with Network(3) as network, ranks(network, steps_for_ever, security) as running:
        running.wait_for_steps()
        since = time.monotonic()
        network.cut(*ways)
        ends = [running.end(rank) for rank in range(3)]
        for end, may_be in zip(ends, blamed, strict=True):
            _assert_lost(end, may_be)
            assert end.at - since < PATIENCE_S + SLACK_S
        running.join(since)


@secured
def test_a_host_that_dies_without_a_packet_is_lost(security: str) -> None:
    """Its connections stay half open: nothing says that they ended."""
    with Network(2) as network, ranks(network, steps_for_ever, security) as running:
        running.wait_for_steps()
        since = time.monotonic()
        network.isolate([1])
        running.processes[1].kill()
        end = running.end(0)
        _assert_lost(end, {1})
        assert PATIENCE_S / 2 < end.at - since < PATIENCE_S + SLACK_S


def _assert_lost(end: End, may_be: Collection[int]) -> None:
    assert end.error == "PipelineAborted", end
    assert end.origin is not None
    stage, _, cause = end.origin
    assert stage in may_be, end
    assert "PeerLostError" in cause, end
