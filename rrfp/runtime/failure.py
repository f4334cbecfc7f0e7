"""The one failure that ends a rank: its origin, which travels to every rank, and its cause, which stays here."""

from __future__ import annotations

from rrfp.compute.tracebacks import place_of, trim
from rrfp.core.tasks import Task
from rrfp.core.topology import Topology
from rrfp.errors import Origin, PeerLostError, PipelineAborted

#: Longer causes are cut, in characters: an abort has to fit into a message's header.
MAX_CAUSE = 8192


class Failure:
    """Why this rank ended.

    Args:
        origin: where it began.
        cause: the exception that this rank saw, if it began here.
    """

    def __init__(self, origin: Origin, cause: BaseException | None = None) -> None:
        self.origin = origin
        #: Whether the caller has been told.
        self.told = False
        self._cause = cause

    def error(self) -> PipelineAborted:
        """What to raise to the caller; a fresh one each time, since a raised exception collects tracebacks."""
        self.told = True
        error = PipelineAborted(self.origin)
        error.__cause__ = self._cause
        if self._cause is not None:
            trim(self._cause)
            if place := place_of(self._cause):
                error.add_note(f"raised at {place}")  # the last line of all that is printed
        return error


def failure_of(error: BaseException, place: Topology, task: Task | None = None) -> Failure:
    """What ``error``, seen at ``place`` while it ran ``task``, means for the pipeline."""
    if isinstance(error, PipelineAborted):
        return Failure(error.origin, error.__cause__)
    if isinstance(error, PeerLostError):
        return Failure(_origin(place, error.peer, None, f"{type(error).__name__}: {error.reason}"), error)
    return Failure(_origin(place, place.rank, None if task is None else str(task), _describe(error)), error)


def _origin(place: Topology, rank: int, task: str | None, cause: str) -> Origin:
    told = rank if place.world > place.stages else None
    return Origin(place.place_of(rank).stage, task, cause, told)


def _describe(error: BaseException) -> str:
    """One text, whatever the exception does: it may be huge, no valid Unicode, or raise when it is asked."""
    try:
        text = str(error)
    except Exception as broken:
        text = f"(its text cannot be had: {type(broken).__name__})"
    name = type(error).__name__
    full = (f"{name}: {text}" if text else name).encode(errors="backslashreplace").decode()
    return full if len(full) <= MAX_CAUSE else f"{full[:MAX_CAUSE]} ... ({len(full)} characters)"
