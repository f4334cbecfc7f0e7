"""Another program writes to the ranks' store: no rank trains on what it wrote, and no rank is blamed for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgpack
import pytest
from fork_server import fork_server
from runtime.children import Children, End
from runtime.starting import ENTERED, FAILED, SETTINGS, Ranks, foreign, forge

__all__ = ["fork_server"]

SECRET = {"RRFP_SECRET": "0123456789abcdef" * 2}
NOBODY = 65534


@pytest.fixture
def children() -> Iterator[list[Children]]:
    made: list[Children] = []
    yield made
    for each in made:
        each.kill()


def forged(children: list[Children], ranks: Ranks, keys: list[str], value: bytes, awaited: Sequence[str] = ()) -> None:
    """Have another user write ``value``."""
    other = Children()
    children.append(other)
    other.start("forger", forge, ranks.port, keys, value, list(awaited), NOBODY)
    assert other.hear(0) == "forged"
    other.join(time.monotonic())


def started(children: list[Children], count: int = 3, **options: object) -> Ranks:
    ranks = Ranks(count, **options)
    children.append(ranks)
    return ranks


def ends(ranks: Ranks, count: int = 3) -> list[End]:
    return [ranks.end(index) for index in range(count)]


VERDICT = msgpack.packb({"ties": [], "read": bytes(32)})


@pytest.mark.parametrize("value", [VERDICT, b"garbage"])
def test_with_a_secret_a_forged_verdict_is_refused_and_the_store_blamed(children: list[Children], value: bytes) -> None:
    ranks = started(children, connect_timeout=20.0)
    forged(children, ranks, [SETTINGS + "verdict"], value)
    for rank in (1, 2):
        ranks.go(rank, SECRET)
    outcomes = ends(ranks, 2)
    since = time.monotonic()
    ranks.go(0, SECRET)
    outcomes.append(ranks.end(2))
    assert time.monotonic() - since < 10
    assert [end.error for end in outcomes] == ["TransportError"] * 3, outcomes
    for end in outcomes:
        assert "store has a verdict of rank 0 without a voucher" in end.text
        assert "or another program wrote to the store" in end.text


def test_without_a_secret_a_verdict_that_rank_0_did_not_reach_ends_all(children: list[Children]) -> None:
    ranks = started(children, connect_timeout=20.0)
    forged(children, ranks, [SETTINGS + "verdict"], VERDICT)
    for rank in (1, 2):
        ranks.go(rank)
    store = foreign(ranks.port)
    store.wait([SETTINGS + "1", SETTINGS + "2"])
    ranks.go(0)
    for end in ends(ranks):
        assert "ranks found two different verdicts of rank 0 in the rendezvous store: another program" in end.text


def test_without_a_secret_terms_that_no_rank_published_end_all(children: list[Children]) -> None:
    """Rank 1 has another seed; who writes rank 2's settings in its place would hide that from rank 0."""
    ranks = started(children, connect_timeout=20.0)
    ranks.go(1, seed=5)
    ranks.go(2)
    store = foreign(ranks.port)
    store.wait([SETTINGS + "1", SETTINGS + "2"])
    forged(children, ranks, [SETTINGS + "1"], store.get(SETTINGS + "2"))
    ranks.go(0)
    for end in ends(ranks):
        assert "ranks found settings that no rank of this job has published in the rendezvous store" in end.text


@pytest.mark.every_other
@pytest.mark.parametrize("variables", [{}, SECRET], ids=["no secret", "secret"])
@pytest.mark.parametrize("value", [b"\xc1garbage", b""], ids=["garbage", "deleted"])
def test_terms_that_are_garbage_or_gone_blame_no_rank(
    children: list[Children], value: bytes, variables: dict[str, str]
) -> None:
    ranks = started(children, connect_timeout=3.0)
    for rank in (1, 2):
        ranks.go(rank, variables)
    foreign(ranks.port).wait([SETTINGS + "1", SETTINGS + "2"])
    forged(children, ranks, [SETTINGS + "1"], value)
    ranks.go(0, variables)
    for end in ends(ranks):
        assert end.error in ("TransportError", "ProtocolError"), end
        assert "another program wrote to the store" in end.text


@pytest.mark.every_other
@pytest.mark.parametrize("variables", [{}, SECRET], ids=["no secret", "secret"])
@pytest.mark.parametrize(
    ("keys", "value"),
    [([SETTINGS + "1"], b""), ([SETTINGS + "1", ENTERED + "1"], b""), ([ENTERED + "1"], b"7")],
    ids=["settings deleted", "both deleted", "at another pipeline"],
)
def test_a_rank_that_is_hidden_or_sent_elsewhere_in_the_store_is_not_blamed_alone(
    children: list[Children], keys: list[str], value: bytes, variables: dict[str, str]
) -> None:
    ranks = started(children, connect_timeout=3.0)
    for rank in (1, 2):
        ranks.go(rank, variables)
    store = foreign(ranks.port)
    store.wait([SETTINGS + "1", SETTINGS + "2"])
    forged(children, ranks, keys, value)
    if value:
        forged(children, ranks, [SETTINGS + "1"], b"")
    assert store.check([SETTINGS + "2"])
    assert not store.check([SETTINGS + "1"])
    ranks.go(0, variables)
    for end in ends(ranks):
        assert end.error == "TransportError", end
        assert "another program wrote to the store" in end.text
        if value and variables:
            assert "store has an entry of stage 1 without a voucher" in end.text
        elif value:
            assert "stage 1 did not come to pipeline '0', it is at pipeline '7', or another" in end.text
        else:
            said = (
                "stage 1 did not come, or another" if len(keys) > 1 else "stage 1 came, and its settings are missing: "
            )
            assert said in end.text


def test_without_a_secret_a_rank_whose_settings_were_forged_says_so(children: list[Children]) -> None:
    """The others have only the store's word: they say that."""
    ranks = started(children, connect_timeout=20.0)
    ranks.go(1)
    ranks.go(2)
    store = foreign(ranks.port)
    store.wait([SETTINGS + "1", SETTINGS + "2"])
    settings = msgpack.unpackb(store.get(SETTINGS + "1"))
    settings["all"]["seed"] = 5
    forged(children, ranks, [SETTINGS + "1"], msgpack.packb(settings))
    ranks.go(0)
    first, second, third = ends(ranks)
    assert first.error == "TransportError"
    assert (
        "store had settings of stage 1 for rank 0 that are not this rank's: another program wrote to the s"
        in first.text
    )
    for end in (second, third):
        assert end.error == "ConfigError"
        assert end.text == (
            "seed is 0 on stage 0 and 5 on stage 1: must be the same on all ranks (values as the rendezvous store has "
            "them)"
        )


@pytest.mark.parametrize("variables", [{}, SECRET], ids=["no secret", "secret"])
def test_garbage_in_place_of_a_failed_start_ends_the_start_and_blames_the_store(
    children: list[Children], variables: dict[str, str]
) -> None:
    ranks = started(children, 2, connect_timeout=20.0)
    forged(children, ranks, [FAILED], b"\xc1garbage")
    ranks.go(1, variables)
    end = ranks.end(0)
    assert end.error == "TransportError"
    assert end.text == "the rendezvous store has a failed start that cannot be read: another program wrote to the store"


@pytest.mark.parametrize("variables", [{}, SECRET], ids=["no secret", "secret"])
def test_what_is_written_once_ranks_are_connected_has_no_effect(
    children: list[Children], variables: dict[str, str]
) -> None:
    ranks = started(children, steps=3)
    for rank in range(3):
        ranks.go(rank, variables)
    assert [ranks.hear(rank) for rank in range(3)] == ["started"] * 3
    transports = [f"{name}/job/0/0/{rank}" for name in ("auto", "shm", "zmq") for rank in range(3)]
    keys = [FAILED, SETTINGS + "verdict", SETTINGS + "1", SETTINGS + "2", ENTERED + "0", *transports]
    forged(children, ranks, keys, b"\xc1garbage")
    for connection in ranks.connections:
        connection.send("go on")
    outcomes = ends(ranks)
    assert [end.error for end in outcomes] == [""] * 3, outcomes
    assert all(len(end.value) == 3 for end in outcomes)
