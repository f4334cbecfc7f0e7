"""Works out the ties of a job from the copies of all ranks, or why they cannot be. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rrfp.compute.gradients.tie_copies import CopyTerms, Tie
from rrfp.core.topology import Topology
from rrfp.errors import ConfigError
from rrfp.graphs.names import TextOf, numbered

#: The copies of one tie: rank and terms, by virtual stage.
_Copies = dict[int, tuple[int, CopyTerms]]


def agree(terms: Mapping[int, Sequence[CopyTerms]], topology: Topology, text_of: TextOf = numbered) -> tuple[Tie, ...]:
    """The ties of a job, the first virtual stages' first.

    A tie is between ranks of one replica that have the same place in their groups, and the same in all of these.

    Args:
        terms: of the copies of each rank.
        topology: of this rank, for the places and names of all.
        text_of: names virtual stages in errors.

    Raises:
        ConfigError: if a copy is alone, or copies differ in kind, in whether they learn or in their values, or replicas
            in their ties. Names the tie and the ranks.
    """
    pipelines: dict[tuple[int, int], dict[str, _Copies]] = {}
    for rank, copies in sorted(terms.items()):
        at = topology.place_of(rank)
        ties = pipelines.setdefault((at.replica, at.member), {})
        for copy in copies:
            ties.setdefault(copy.tie, {})[copy.virtual_stage] = (rank, copy)
    agreed: dict[str, Tie] = {}
    for name in dict.fromkeys(name for ties in pipelines.values() for name in ties):
        of_all = [dict(sorted(ties.get(name, {}).items())) for ties in pipelines.values()]
        _check_same(name, of_all, text_of)
        for copies_by_stage in of_all:
            _check_copies(name, copies_by_stage, topology, text_of)
        is_shared = any(copy.is_guest for _, copy in of_all[0].values())
        agreed[name] = Tie(name, tuple(of_all[0]), is_shared)
    return tuple(sorted(agreed.values(), key=lambda tie: (tie.virtual_stages, tie.name)))


def _check_same(name: str, of_all: Sequence[_Copies], text_of: TextOf) -> None:
    for copies in of_all[1:]:
        if list(copies) != list(of_all[0]):
            raise ConfigError(
                f"tie {name!r} is on {_listed(of_all[0], text_of)} of one replica or group member and on "
                f"{_listed(copies, text_of)} of another: must be the same in all"
            )


def _check_copies(name: str, copies: _Copies, topology: Topology, text_of: TextOf) -> None:
    (v, (rank, first)), *others = copies.items()
    if not others:
        raise ConfigError(
            f"tie {name!r} is on {text_of(v)} ({topology.name_of(rank)}) alone, must be on two at least: every "
            "rank with a copy passes it by the same name"
        )
    for _, (other, copy) in others:
        here, there = topology.name_of(rank), topology.name_of(other)
        if copy.kind != first.kind:
            raise ConfigError(f"tie {name!r} is {first.kind} on {here} and {copy.kind} on {there}: must be the same")
        if copy.learns != first.learns:
            learns, frozen = (here, there) if first.learns else (there, here)
            raise ConfigError(f"tie {name!r} requires grad on {learns} and not on {frozen}: must be the same")
        if not copy.is_guest and copy.values != first.values:
            raise ConfigError(
                f"tie {name!r} has other values on {there} than on {here}: must start equal, from one checkpoint or "
                "one seed"
            )


def _listed(copies: _Copies, text_of: TextOf) -> str:
    return ", ".join(map(text_of, copies)) or "none"
