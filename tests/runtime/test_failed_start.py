"""A rank that cannot start tells the others, who end with its reason long before ``connect_timeout``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fork_server import fork_server
from runtime.starting import SETTINGS, Fragile, Ranks, foreign
from runtime.test_poisoned_store import SECRET

from rrfp import Topology, timeouts
from rrfp.errors import ConfigError, Origin, PipelineAborted, TransportError
from rrfp.host import ProcessIdentity
from rrfp.runtime import records
from rrfp.runtime.start.failed_start import FailedStart, FailedStarts
from rrfp.transports.rendezvous import LocalRendezvous

__all__ = ["fork_server"]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(3, connect_timeout=60.0)
    yield made
    made.kill()


def refused(ranks: Ranks, odd: int, common: dict[str, str], own: dict[str, str], **options: Any) -> list[str]:
    """Start the rank ``odd`` last, which refuses and stays; what the others end with, and how late."""
    both = options.pop("both", {})
    others = [rank for rank in range(3) if rank != odd]
    for rank in others:
        ranks.go(rank, common, **both)
    foreign(ranks.port).wait([SETTINGS + str(rank) for rank in others if rank])
    ranks.go(odd, own, goes_on=True, **both, **options)
    first = ranks.end(2)
    assert first.error in ("ConfigError", "OSError"), first
    ends = [ranks.end(index) for index in range(2)]
    assert [end.error for end in ends] == ["TransportError"] * 2, ends
    assert max(end.at for end in ends) - first.at < 2.0
    ranks.connections[2].send("enough")
    return [end.text for end in ends]


def test_an_option_that_one_rank_refuses_when_it_is_made(ranks: Ranks) -> None:
    for text in refused(ranks, 1, {}, {}, seed=0.5):
        assert text.startswith("stage 1 says, through the store: ConfigError: seed is 0.5")


def test_the_same_of_rank_0_in_a_job_with_a_secret(ranks: Ranks) -> None:
    for text in refused(ranks, 0, SECRET, SECRET, seed=0.5):
        assert text.startswith("stage 0 cannot start: ConfigError: seed is 0.5")


def test_a_rank_with_a_bad_secret_is_named_by_those_with_a_good_one(ranks: Ranks) -> None:
    for text in refused(ranks, 2, SECRET, {"RRFP_SECRET": "short"}):
        assert text.startswith("stage 2 says, through the store: ConfigError: RRFP_SECRET holds 5 bytes, must hold at")
        assert text.endswith("(the secret of this job does not vouch for it)")


def test_a_rank_without_the_secret_is_named_by_all(ranks: Ranks) -> None:
    for rank, variables in enumerate((SECRET, {}, SECRET)):
        ranks.go(rank, variables)
    texts = [ranks.end(rank).text for rank in range(3)]
    assert all("store has settings of stage 1 without a voucher: the rank has no secret" in texts[n] for n in (0, 2))
    assert "store has a verdict of rank 0 with a voucher: the rank has a secret, and stage 1 has none" in texts[1]


def test_what_fails_after_ranks_have_compared_their_terms(ranks: Ranks) -> None:
    for text in refused(ranks, 1, {}, {"FRAGILE": "1"}, both={"hint": Fragile}):
        assert text == "stage 1 says, through the store: OSError: its file is missing"


def test_a_loss_in_ddp_is_refused_by_its_name(ranks: Ranks) -> None:
    for text in refused(ranks, 2, {}, {"WRAPPED": "1"}):
        assert text.startswith(
            "stage 2 says, through the store: ConfigError: the submodule 'loss_fn.head' of virtual stage 2 is in "
            "DistributedDataParallel, which reduces once for each forward and backward"
        )


def test_a_text_of_another_program_is_bounded_and_printable(ranks: Ranks) -> None:
    reason = "\x1b[2J" + "x" * 10_000
    value = records.pack(FailedStart(1, reason, ProcessIdentity("nowhere", 1)))
    foreign(ranks.port).set("failed/job/0/0", value)
    since = time.monotonic()
    ranks.go(2)
    end = ranks.end(0)
    assert end.error == "TransportError"
    assert end.text.startswith("stage 1 says, through the store: ?[2Jxxx")
    assert len(end.text) < 3000
    assert end.at - since < timeouts.CONNECT_S


def failed_starts_of_two(met: LocalRendezvous) -> list[FailedStarts]:
    """Those of two ranks that meet in this process."""

    async def meet(timeout_s: float) -> LocalRendezvous:
        return met

    return [FailedStarts(Topology(rank, 2), "job", meet, None) for rank in range(2)]


def test_what_fails_before_there_is_a_loop_ends_the_start_of_the_others() -> None:
    first, second = failed_starts_of_two(LocalRendezvous())

    async def start() -> None:
        await second.meet(1.0)
        async with asyncio.timeout(10):
            await asyncio.get_running_loop().create_future()

    first.report_now(ConfigError("seed is 0.5"))
    with pytest.raises(TransportError, match=r"^stage 0 says, through the store: ConfigError: seed is 0\.5$"):
        asyncio.run(second.unless_reported(start()))


async def test_a_failure_that_travelled_over_the_transport_is_raised_and_not_reported_again() -> None:
    first, _ = failed_starts_of_two(met := LocalRendezvous())
    aborted = PipelineAborted(Origin(1, None, "ValueError: second"))

    async def start() -> None:
        await first.meet(1.0)
        raise aborted

    with pytest.raises(PipelineAborted) as caught:
        await first.unless_reported(start())
    assert caught.value is aborted
    with pytest.raises(TransportError, match="failed/job/0"):
        await met.lookup("failed/job/0", 0.0)
