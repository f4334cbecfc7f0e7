"""What ranks tell about ties, judged: one verdict for jobs with replicas and groups too."""

from __future__ import annotations

import pytest

from rrfp import Topology
from rrfp.compute.gradients.ties import CopySettings, Tie
from rrfp.errors import ConfigError, ProtocolError
from rrfp.model.mesh import Mesh
from rrfp.runtime.start.handshake import agree_on_ties, check_agreed

#: Ranks 0 and 1 are stages of one pipeline, 2 and 3 of the other.
TWO = Topology.at(0, Mesh((("dp", 2), ("pp", 2))))
#: Ranks 0 and 1 are members of stage 0's group, 2 and 3 of stage 1's.
GROUPS = Topology.at(0, Mesh((("pp", 2), ("tp", 2))))


def copy(
    tie: str, v: int, *, values: bytes = b"1", is_guest: bool = False, kind: str = "(2, 3) of float"
) -> CopySettings:
    return CopySettings(tie, v, kind, True, is_guest, b"" if is_guest else values)


def refused(told: dict[int, list[CopySettings]], place: Topology) -> str:
    with pytest.raises(ConfigError) as caught:
        agree_on_ties(told, place)
    return str(caught.value)


def test_a_tie_is_between_the_stages_of_each_replica() -> None:
    told = {0: [copy("a", 0)], 1: [copy("a", 1)], 2: [copy("a", 0)], 3: [copy("a", 1)]}
    assert agree_on_ties(told, TWO) == (Tie("a", (0, 1)),)


def test_members_of_a_group_hold_other_values() -> None:
    told = {rank: [copy("a", rank // 2, values=b"one" if rank % 2 else b"two")] for rank in range(4)}
    assert agree_on_ties(told, GROUPS) == (Tie("a", (0, 1)),)
    told[3] = [copy("a", 1, values=b"two")]
    assert refused(told, GROUPS).startswith(
        "tie 'a' has other values on stage 1, tp 1 (rank 3) than on stage 0, tp 1 (rank 1)"
    )


def test_ties_come_in_the_order_of_their_first_virtual_stages_and_names() -> None:
    told = {0: [copy("c", 0), copy("a", 0), copy("b", 2)], 1: [copy("c", 1), copy("b", 1), copy("a", 3)]}
    ties = agree_on_ties(told, Topology(1, 2))
    assert ties == (Tie("c", (0, 1)), Tie("a", (0, 3)), Tie("b", (1, 2)))


def test_a_guest_has_the_values_of_its_home() -> None:
    told = {0: [copy("a", 0), copy("a", 3, is_guest=True)], 1: [copy("a", 1, values=b"1")]}
    assert agree_on_ties(told, Topology(0, 2)) == (Tie("a", (0, 1, 3), is_shared=True),)


def test_nothing_told_is_no_tie() -> None:
    assert agree_on_ties({0: [], 1: []}, Topology(0, 2)) == ()


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({}, "on virtual stage 0, virtual stage 1 of one replica or group member and on none of another"),
        (
            {2: [copy("a", 0)]},
            "on virtual stage 0, virtual stage 1 of one replica or group member and on virtual stage 0 of another",
        ),
    ],
)
def test_replicas_that_tie_other_stages_are_refused(second: dict[int, list[CopySettings]], text: str) -> None:
    told = {0: [copy("a", 0)], 1: [copy("a", 1)], 2: [], 3: [], **second}
    assert refused(told, TWO) == f"tie 'a' is {text}: must be the same in all"


# What a rank takes for the ties of the job.

HELD = [copy("a", 0), copy("a", 3, is_guest=True)]


@pytest.mark.parametrize(
    "ties",
    [
        (),
        (Tie("b", (1, 2)),),
        (Tie("a", (0,), is_shared=True),),
        (Tie("a", (), is_shared=True),),
        (Tie("a", (1, 2), is_shared=True),),
        (Tie("a", (0, 1), is_shared=True),),
        (Tie("a", (0, 2, 3)),),
        (Tie("a", (3, 2, 0), is_shared=True),),
        (Tie("a", (0, 3, 3), is_shared=True),),
        (Tie("a", (-1, 0, 3), is_shared=True),),
        (Tie("a", (0, 3, 4), is_shared=True),),
        (Tie("a", (0, 2, 3), is_shared=True), Tie("b", (0, 1))),
        (Tie("a", (0, 2, 3), is_shared=True), Tie("b", (1,))),
        (Tie("a", (0, 2, 3), is_shared=True), Tie("a", (0, 3), is_shared=True)),
    ],
    ids=str,
)
def test_ties_that_cannot_be_those_of_the_job_are_refused(ties: tuple[Tie, ...]) -> None:
    """A rank that has virtual stages 0 and 3 of 4 would train its copies apart."""
    with pytest.raises(ProtocolError, match=r"^the verdict of rank 0 cannot be right: it has (tie '[ab]'|a tie twice)"):
        check_agreed(ties, HELD, (0, 3), 4)


def test_the_ties_of_the_job_may_be_those_of_others_too() -> None:
    check_agreed((Tie("a", (0, 2, 3), is_shared=True), Tie("b", (1, 2))), HELD, (0, 3), 4)
    check_agreed((Tie("b", (1, 2)),), [], (0, 3), 4)


def test_an_object_on_several_stages_of_any_replica_makes_a_tie_shared() -> None:
    told = {0: [copy("a", 0), copy("a", 2)], 1: [], 2: [*HELD[:1], copy("a", 2, is_guest=True)], 3: []}
    assert agree_on_ties(told, TWO) == (Tie("a", (0, 2), is_shared=True),)
