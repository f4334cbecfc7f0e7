"""The ranks of a simulated cluster: how they are numbered and called.

A pipeline of N stages has R replicas of T members. Member t exchanges tensors with member t of the other stages of its
replica; the members of a stage and replica are a group with the same order; ranks that differ in the replica alone
sum their gradients.
"""

from __future__ import annotations

import functools

from rrfp.model.mesh import Mesh, MeshPosition


class Rank(int):
    """A rank's number, with its coordinate."""

    stage: int
    replica: int
    #: Its index in its group; 0 leads.
    member: int
    #: "stage 1" where a stage has one rank, else "stage 1 replica 0 member 2", less what is always 0.
    name: str

    def __new__(cls, number: int, coordinate: MeshPosition, name: str) -> Rank:
        self = super().__new__(cls, number)
        self.stage, self.replica, self.member = coordinate
        self.name = name
        return self

    @property
    def salt(self) -> int:
        """What makes its values differ from those of other replicas and shards."""
        return self.salt_in(self.replica)

    def salt_in(self, replica: int) -> int:
        """The salt of its counterpart in ``replica``."""
        return 1000 * replica + self.member

    def __str__(self) -> str:
        return self.name


def name_of_rank(rank: int) -> str:
    """Its display name; a bare number is its stage's only rank."""
    return rank.name if isinstance(rank, Rank) else f"stage {rank}"


def stage_of_rank(rank: int) -> int:
    """Its stage; a bare number is the only rank of its stage."""
    return rank.stage if isinstance(rank, Rank) else rank


@functools.cache
def ranks_of(stages: int, replicas: int = 1, members: int = 1) -> tuple[Rank, ...]:
    """All ranks by number: members are neighbours, then replicas, then stages."""
    mesh = Mesh((("pp", stages), ("dp", replicas), ("tp", members)))
    return tuple(Rank(number, mesh.place_of(number), _name(mesh.place_of(number), mesh)) for number in range(mesh.size))


def _name(coordinate: MeshPosition, mesh: Mesh) -> str:
    replica = f" replica {coordinate.replica}" if mesh.replicas > 1 else ""
    member = f" member {coordinate.member}" if mesh.members > 1 else ""
    return f"stage {coordinate.stage}{replica}{member}"
