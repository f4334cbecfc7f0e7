"""What belongs to a rank and not to the model: its random numbers, and the caller's own state of data and schedules."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rrfp.checkpoint import plain
from rrfp.log import get_logger

logger = get_logger(__name__)

_ENTRY = re.compile(r"ranks\.(\d+)\.(\d+)\.(\d+)")
_LOST = "ranks.lost."


class Pipe(Protocol):
    """A pipeline: `rrfp.Pipeline`, `rrfp.local`, or their blocking form."""

    def state_dict(self) -> dict[str, Any]:
        """As `rrfp.Pipeline.state_dict`."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `rrfp.Pipeline.load_state_dict`."""


class Place(NamedTuple):
    """Where a rank is."""

    #: Its index among those with data of their own: replicas, and ranks that shard parameters over a ``dp`` dim.
    replica: int
    stage: int
    rank: int

    @classmethod
    def of(cls, state: Mapping[str, Any] | None, rank: int) -> Place:
        """The place of ``rank``, by the ``state`` of its pipeline; without one, each rank is a replica."""
        return cls(rank, 0, rank) if state is None else cls(state["replica"], state["stage"], rank)

    @property
    def entry(self) -> str:
        return f"ranks.{self.replica}.{self.stage}.{self.rank}"


def saved_places(names: Iterable[str]) -> list[Place]:
    return sorted(Place(*map(int, match.groups())) for name in names if (match := _ENTRY.fullmatch(name)))


def lost_entry(rank: int) -> str:
    return f"{_LOST}{rank}"


def lost_of(names: Iterable[str]) -> int:
    """How many ranks were lost before the save, by the names of the entries."""
    return sum(name.startswith(_LOST) for name in names)


def replicas_of(places: Iterable[Place]) -> int:
    return len({each.replica for each in places})


def entry_for(position: Place, saved: list[Place], world: int) -> tuple[str | None, bool]:
    """The entry that a rank at ``place`` loads, and whether it is of the very same place.

    ``world`` ranks would have saved in the layout that loads. On another one, and on a rank that was lost, that is the
    entry of its replica's first rank; None if the checkpoint has no such replica.
    """
    if position in saved and len(saved) == world:
        return position.entry, True
    replicas = [each for each in saved if each.replica == position.replica]
    if replicas:
        return replicas[0].entry, False
    if saved:
        count = replicas_of(saved)
        text = "the checkpoint has %d data-parallel rank(s), and none with index %d: extra is None on rank %d"
        logger.warning(text, count, position.replica, position.rank)
    return None, False


def pack(extra: Any) -> Tensor:
    """The caller's ``extra`` and the state of torch's default generators, as bytes."""
    has_devices = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = torch.cuda.get_rng_state_all() if has_devices else []
    stream = io.BytesIO()
    torch.save({"extra": extra, "cpu": torch.get_rng_state(), "cuda": devices}, stream)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def unpack(packed: Tensor, *, restore: bool, trust_pickles: bool) -> Any:
    """The caller's ``extra``; ``restore`` says whether the generators go on from the saved state."""
    state = plain.read(io.BytesIO(packed.numpy().tobytes()), trust_pickles=trust_pickles)
    if restore:
        torch.set_rng_state(state["cpu"])
        if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
    return state["extra"]
