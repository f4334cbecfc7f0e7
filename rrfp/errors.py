"""The exception tree, ordered by fault.

Every error that this package raises on purpose derives from :class:`RrfpError`. The second level names the part at
fault: the caller (`ConfigError`), code that the caller plugged in (`LocalError`), another rank (`PeerError`), the
connection between two ranks (`TransportError`). When any rank fails, every rank raises `PipelineAborted`, which names
the origin.

Every error survives pickling, because launchers carry exceptions between processes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

__all__ = [
    "ConfigError",
    "DeadlockError",
    "Faults",
    "FrameError",
    "HintError",
    "LocalError",
    "Origin",
    "OverdueError",
    "PeerError",
    "PeerLostError",
    "PipelineAborted",
    "ProtocolError",
    "RankLostError",
    "RrfpError",
    "StageError",
    "TransportClosedError",
    "TransportError",
]


#: Who sent a message: another stage, or a member of this rank's own group, with its index.
Sender = tuple[Literal["stage", "member"], int]


class RrfpError(Exception):
    """Base of every error of this package."""


class ConfigError(RrfpError, ValueError):
    """A value of the caller does not exist or does not fit; names the field and the allowed values.

    Attributes:
        faults: the texts of several independent errors that this one joins; empty where there is one.
    """

    faults: tuple[str, ...] = ()

    @classmethod
    def joining(cls, faults: Iterable[str]) -> ConfigError:
        """One error for several, with a line for each.

        Args:
            faults: their texts, at least one.
        """
        texts = tuple(dict.fromkeys(faults))
        if len(texts) == 1:
            return cls(texts[0])
        error = cls("".join([f"{len(texts)} faults:", *(f"\n- {text}" for text in texts)]))
        error.faults = texts
        return error


class Faults:
    """Joins the `ConfigError`s of independent checks, so that a caller reads about all mistakes at once.

    Every check that may raise stands in a block of its own, ``with faults.kept():``, inside ``with Faults() as
    faults:``; `keep` takes a fault as it is. At the end of the outer block one `ConfigError` names all faults. A check
    that needs the result of another belongs behind the outer block, or into the other's block.
    """

    def __init__(self) -> None:
        self._errors: list[ConfigError] = []

    def keep(self, reason: str) -> None:
        """Keep a fault that was found."""
        self._errors.append(ConfigError(reason))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep a `ConfigError` of this block until the end of the outer one."""
        try:
            yield
        except ConfigError as error:
            self._errors.append(error)

    def __enter__(self) -> Faults:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None or not self._errors:
            return
        if len(self._errors) == 1:
            raise self._errors[0]
        texts = (text for error in self._errors for text in error.faults or (str(error),))
        raise ConfigError.joining(texts) from None  # it has their texts


def misspelt(name: object, known: Iterable[str]) -> str:
    """An unknown ``name`` for an error, with the known one that is most like it, if any is."""
    nearest = nearest_to(name, known) if isinstance(name, str) else None
    return repr(name) if nearest is None else f"{name!r} (did you mean {nearest!r}?)"


def nearest_to(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like ``name``, if any is."""
    lower, by_lower = name.lower(), {each.lower(): each for each in known}
    if lower in by_lower:
        return by_lower[lower]
    for index in range(len(lower) - 1):
        # Of which difflib, that compares runs of characters, thinks little in a short name.
        swapped = f"{lower[:index]}{lower[index + 1]}{lower[index]}{lower[index + 2 :]}"
        if swapped in by_lower:
            return by_lower[swapped]
    # Nearer than difflib asks by default, by which 'dualpipe' would mean 'gpipe'.
    return next((by_lower[each] for each in difflib.get_close_matches(lower, list(by_lower), n=1, cutoff=0.7)), None)


class LocalError(RrfpError):
    """Code plugged in on this rank broke its contract."""


class HintError(LocalError):
    """A hint chose a task that is not ready, or None although it may not wait."""


class StageError(LocalError):
    """A stage program broke a rule of the runtime, such as writing into a received tensor."""


class OverdueError(LocalError):
    """A task has run for longer than ``abort_after``. The message ends with the Python stack of its thread."""


class PeerError(RrfpError):
    """Another rank broke the contract or went away."""


class ProtocolError(PeerError):
    """A peer's message contradicts this rank's state: duplicate, out of step, unknown task, other step size or mode.

    Attributes:
        sender: the sender, for a message that arrived before its step and was applied when the step opened; None for
            all others, whose sender the runtime knows.
        is_of_callers: whether programs made different calls, so that frames of the runtime say nothing.
    """

    sender: Sender | None = None
    is_of_callers = False


class PeerLostError(PeerError):
    """A peer's process ended or fell silent.

    Attributes:
        peer: the lost rank.
        reason: the observation, such as a connection that ended.
    """

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(peer, reason)
        self.peer = peer
        self.reason = reason

    def __str__(self) -> str:
        return f"rank {self.peer} is lost: {self.reason}"


class TransportError(RrfpError):
    """Sending or receiving failed for a reason that is neither rank's fault."""


class TransportClosedError(TransportError):
    """The transport was closed or aborted before the call or during it."""


class FrameError(TransportError):
    """A received frame was malformed; it was dropped.

    Attributes:
        peer: rank of the sender, or None where the frame does not identify it.
        field: the header field or frame at fault.
        reason: the fault and the allowed values.
    """

    def __init__(self, peer: int | None, field: str, reason: str) -> None:
        super().__init__(peer, field, reason)
        self.peer = peer
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        sender = "an unknown peer" if self.peer is None else f"rank {self.peer}"
        return f"bad frame from {sender}: {self.field}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a failure began.

    Attributes:
        stage: stage index of the rank that failed.
        task: the task it was running, in its text form, or None; with a graph followed by the part: ``F3@2 (audio)``;
            where replicas share the step by the number of its own caller: ``F3@2 (microbatch 1 of replica 0)``.
        cause: the exception as one line, ``TypeName: message``.
        rank: the rank, where a stage has several; None where the stage identifies it.
    """

    stage: int
    task: str | None
    cause: str
    rank: int | None = None

    def __str__(self) -> str:
        where = f"stage {self.stage}" if self.rank is None else f"stage {self.stage} (rank {self.rank})"
        return f"{where}: {self.cause}" if self.task is None else f"{where}, task {self.task}: {self.cause}"


class PipelineAborted(RrfpError):
    """The pipeline ended on every rank because one rank failed. It cannot be used again: build a new Pipeline.

    Gradients are undefined afterwards: some microbatches may have been added to ``.grad`` and others not.

    Attributes:
        origin: the rank, task and cause of the first failure known to this rank.
    """

    def __init__(self, origin: Origin) -> None:
        super().__init__(origin)
        self.origin = origin

    def __str__(self) -> str:
        return f"aborted by {self.origin}"


class RankLostError(PipelineAborted):
    """With ``on_lost_rank="finish"``: a rank was lost, and the call's batch was not used.

    It was lost between two steps, in an evaluation, or too early in a step for the others to have its microbatches.
    Parameters are complete on the ranks that are left: save a checkpoint, with ``pipe=pipe``, and end.

    Attributes:
        lost: the lost ranks.
        step: the number of the training step that is not done; those before it are.
        reason: why the others could not finish it.
    """

    def __init__(self, origin: Origin, lost: tuple[int, ...], step: int, reason: str) -> None:
        super().__init__(origin)
        self.args = (origin, lost, step, reason)
        self.lost = lost
        self.step = step
        self.reason = reason

    def __str__(self) -> str:
        numbers = " and ".join(map(str, self.lost))
        return (
            f"rank{'s' * (len(self.lost) > 1)} {numbers} lost ({self.origin}). {self.reason}. Training steps before "
            f"{self.step} are complete: save a checkpoint with pipe=pipe, and end"
        )


class DeadlockError(RrfpError):
    """Every rank is idle, nothing is in flight, and tasks remain. The message is the full report."""
