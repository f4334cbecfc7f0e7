"""How far clocks of two hosts are apart: measured by round trips, and never by more than is said."""

from __future__ import annotations

import random

import pytest

from rrfp.host import ProcessIdentity
from rrfp.runtime.trace_saver import ROUND_TRIPS, ClockOffset, host_clocks, measure_offset, own_clock


class Hosts:
    """Two clocks ``apart`` seconds, and a network whose messages take drawn times, and no time on either host."""

    def __init__(self, apart: float, choices: random.Random, slow_first_s: float = 0.0) -> None:
        self.time = 1000.0
        self.apart = apart
        self.asked = 0
        self._choices = choices
        self._slow_first_s = slow_first_s

    def now(self) -> float:
        return self.time

    async def ask(self) -> float:
        self.time += self._choices.expovariate(1000.0) + (self._slow_first_s if self.asked == 0 else 0.0)
        reading = self.time + self.apart
        self.time += self._choices.expovariate(1000.0)
        self.asked += 1
        return reading


@pytest.mark.parametrize("seed", range(50))
async def test_the_true_offset_is_within_the_error_however_long_either_way_takes(seed: int) -> None:
    choices = random.Random(seed)
    hosts = Hosts(choices.uniform(-1e6, 1e6), choices, slow_first_s=5.0)
    offset = await measure_offset(hosts.now, hosts.ask)
    assert abs(offset.seconds - hosts.apart) <= offset.error_s + 1e-9
    assert offset.error_s < 0.002  # the shortest of eight, not the first, for which a rank was late
    assert hosts.asked == ROUND_TRIPS


def test_the_ranks_of_a_host_share_the_best_offset_and_rank_0s_host_has_none() -> None:
    owners = [("a", "first"), ("a", "first"), ("b", "second"), ("b", "second")]
    offsets = [ClockOffset(0.1, 0.2), ClockOffset(0.3, 0.01), ClockOffset(7.5, 0.4), ClockOffset(7.1, 0.2)]
    first, second = host_clocks(owners, offsets)
    assert (first.host, first.ranks, first.offset) == ("first", (0, 1), ClockOffset(0.0, 0.0))
    assert (second.host, second.ranks, second.offset) == ("second", (2, 3), ClockOffset(7.1, 0.2))


def test_a_clock_is_known_by_more_than_the_name_of_its_host() -> None:
    assert own_clock() == own_clock()
    assert own_clock() != ProcessIdentity.own().host
