"""The handshake: one verdict for all ranks, before they connect."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgpack
import pytest

from rrfp import Topology
from rrfp.errors import ConfigError, ProtocolError, RrfpError, TransportError
from rrfp.model.mesh import Mesh
from rrfp.runtime.start.handshake import Handshake, JobSettings, differences
from rrfp.transports.base import TransportContext
from rrfp.transports.rendezvous import LocalRendezvous

SAME: JobSettings = {"chunks": 2, "placement": "v", "split": True, "strict": None}


async def outcomes(
    settings: Mapping[int, JobSettings], stages: int, met: LocalRendezvous, timeout_s: float = 20.0
) -> list[BaseException | None]:
    """What the handshake of each stage in ``settings`` ends with."""
    hands = [
        Handshake(own, Topology(stage, stages), TransportContext(stage, (), "run", met, connect_timeout_s=timeout_s))
        for stage, own in settings.items()
    ]
    return list(await asyncio.gather(*(each.shake() for each in hands), return_exceptions=True))


def told(ends: Sequence[BaseException | None], kind: type[RrfpError]) -> str:
    """The one text of all ranks."""
    assert all(type(end) is kind for end in ends), ends
    (text,) = {str(end) for end in ends}
    return text


@pytest.mark.parametrize("stages", [1, 2, 9])
async def test_ranks_with_the_same_terms_go_on(stages: int) -> None:
    assert await outcomes(dict.fromkeys(range(stages), SAME), stages, LocalRendezvous()) == [None] * stages


@pytest.mark.parametrize("odd", [0, 1, 4])
async def test_one_rank_that_differs_is_one_error_on_all(odd: int) -> None:
    settings = {stage: {**SAME, "chunks": 3} if stage == odd else SAME for stage in range(5)}
    text = told(await outcomes(settings, 5, LocalRendezvous()), ConfigError)
    ours, theirs = ("3", "2") if odd == 0 else ("2", "3")
    assert text == f"chunks is {ours} on stage 0 and {theirs} on stage {odd or 1}: must be the same on all ranks"


async def test_a_difference_is_told_before_the_last_rank_comes() -> None:
    met = LocalRendezvous()
    ends = await asyncio.wait_for(outcomes({0: SAME, 1: {**SAME, "split": False}}, 3, met), 5)
    text = told(ends, ConfigError)
    assert told(await outcomes({2: SAME}, 3, met), ConfigError) == text, "who comes late is told the same"


async def test_a_rank_that_does_not_come_is_named_on_all() -> None:
    text = told(await outcomes({0: SAME, 1: SAME, 3: SAME}, 4, LocalRendezvous(), 0.1), TransportError)
    assert text == "stage 2 did not come: no rank published 'settings/run/0/2' within 0.1 s"


@pytest.mark.parametrize(
    "said", [b"", b"\xc1", *map(msgpack.packb, (7, {"all": 7}, {"all": {}, "group": [], "copies": []}))]
)
async def test_what_cannot_be_read_is_named_on_all(said: bytes) -> None:
    met = LocalRendezvous()
    await met.publish("settings/run/0/1", said)
    text = told(await outcomes({0: SAME, 2: SAME}, 3, met), ProtocolError)
    assert text.startswith("the rendezvous store has settings of stage 1 that cannot be read: ")
    assert "or another program wrote to the store" in text


@pytest.mark.parametrize(
    "verdict",
    [
        {"error": []},
        {"error": {}, "text": "x"},
        {"error": "ValueError", "text": "x"},
        {"error": "ConfigError", "text": 5},
        {"error": "ConfigError", "text": [[]]},
        {"ties": 5},
        {},
    ],
)
async def test_a_verdict_that_cannot_be_read_is_no_agreement(verdict: object) -> None:
    met = LocalRendezvous()
    await met.publish("settings/run/0/verdict", msgpack.packb(verdict))
    with pytest.raises(ProtocolError, match=r"store has a verdict of rank 0 that cannot be read.*another program"):
        await Handshake(SAME, Topology(1, 2), TransportContext(1, (), "run", met)).shake()


@pytest.mark.parametrize("where", [b"\xa3all", b"\xa6copies", b"\xa3new"])
async def test_no_depth_of_published_lists_escapes_as_another_error(where: bytes) -> None:
    good = msgpack.packb({"all": SAME, "group": {}, "copies": []})
    for depth in range(500, 1010, 50):
        deep = b"\x91" * depth + b"\xc0"
        met = LocalRendezvous()
        told = {b"\xa3all": b"\x83\xa3all\x81\xa6chunks" + deep + good[-16:]}.get(where, b"\x81" + where + deep)
        await met.publish("settings/run/0/1", told)
        with pytest.raises((ConfigError, ProtocolError)):
            await Handshake(SAME, Topology(0, 2), TransportContext(0, (), "run", met)).shake()


def test_every_field_that_differs_is_in_one_line() -> None:
    theirs = {**SAME, "chunks": 1, "split": False, "later": 5}
    assert differences("stage 0", SAME, "stage 7", theirs) == (
        "chunks is 2 on stage 0 and 1 on stage 7; split is True on stage 0 and False on stage 7; "
        "later is None on stage 0 and 5 on stage 7"
    )
    same = {field: SAME[field] for field in reversed(list(SAME))}
    assert differences("stage 0", SAME, "stage 7", same) == ""


def test_of_long_lists_the_first_entries_that_differ_are_shown() -> None:
    """Cut in the middle, both would look the same."""
    parts = [f"layer{n} on stage {n} reads x=layer{n - 1}" for n in range(20)]
    other = [*parts[:9], "layer9 on stage 9 reads y=layer8", *parts[10:]]
    texts: list[JobSettings] = [{"graph": "; ".join(each)} for each in (parts, other, parts[:15])]
    assert differences("stage 0", texts[0], "stage 1", texts[1]) == (
        "graph is 'layer9 on stage 9 reads x=layer8' on stage 0 and 'layer9 on stage 9 reads y=layer8' on stage 1"
    )
    assert differences("stage 0", texts[0], "stage 1", texts[2]) == (
        "graph is 'layer15 on stage 15 reads x=layer14' on stage 0 and '' on stage 1"
    )


async def test_the_ranks_of_a_group_have_terms_of_their_own_in_common() -> None:
    """Two groups of two: the second member of the second group differs from its leader, the groups may differ."""
    mesh = Mesh((("pp", 2), ("tp", 2)))
    met = LocalRendezvous()
    limits = {0: 1, 1: 1, 2: 5, 3: 6}
    hands = [
        Handshake(SAME, Topology.at(rank, mesh), TransportContext(rank, (), "run", met), {"limit": limits[rank]})
        for rank in range(4)
    ]
    text = told(await asyncio.gather(*(each.shake() for each in hands), return_exceptions=True), ConfigError)
    assert text.endswith("must be the same on the ranks of a group")
    assert "limit is 5 on " in text
    assert " and 6 on " in text
    same = [
        Handshake(SAME, Topology.at(rank, mesh), TransportContext(rank, (), "again", met), {"limit": rank // 2})
        for rank in range(4)
    ]
    assert await asyncio.gather(*(each.shake() for each in same)) == [None] * 4
