"""A rank's one failure: it ends whatever this rank's caller waits for, and is broadcast to all other ranks.

Its origin travels to every rank, its cause stays here. The first failure counts: one that a peer reports and one of
this rank end the pipeline alike, and what comes after is a consequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from rrfp import timeouts
from rrfp.compute.tracebacks import place_of, trim
from rrfp.errors import ConfigError, Origin, PeerLostError, PipelineAborted, ProtocolError, RrfpError
from rrfp.log import get_logger
from rrfp.model.tasks import Task
from rrfp.model.topology import Topology
from rrfp.runtime.supervisor import failure_on_loop
from rrfp.transports.base import Channel, Message, MessageKind, Transport

logger = get_logger(__name__)

#: Longer causes are cut, in characters: an abort has to fit into a message's header.
MAX_CAUSE = 8192


class Failure:
    """Why this rank ended: ``cause`` is the exception that this rank saw, if the failure began here."""

    def __init__(self, origin: Origin, cause: BaseException | None = None) -> None:
        self.origin = origin
        #: Whether a call of the caller has raised it.
        self.was_raised = False
        self._cause = cause

    def error(self) -> PipelineAborted:
        """What to raise to the caller; a fresh one each time, since a raised exception collects tracebacks."""
        self.was_raised = True
        error = PipelineAborted(self.origin)
        error.__cause__ = self._cause
        if self._cause is not None:
            trim(self._cause)
            if line := place_of(self._cause):
                error.add_note(f"raised at {line}")  # the last line of all that is printed
        elif advice := advice_for(self.origin):
            error.add_note(advice)
        return error


def advice_for(origin: Origin) -> str:
    """What to do about a process that ended; empty for every other failure."""
    if not origin.cause.startswith(f"{PeerLostError.__name__}: ") or not origin.cause.endswith(" ended"):
        return ""
    return (
        "if it was not ended on purpose, look for 'out of memory' in dmesg on its host, or for what it printed last; "
        "to go on, resume from the newest checkpoint"
    )


def lost_rank(origin: Origin) -> int | None:
    """The rank whose process ended or fell silent, if that is the failure; None if its program left in order."""
    if not origin.cause.startswith(f"{PeerLostError.__name__}: ") or "its program left" in origin.cause:
        return None
    return origin.stage if origin.rank is None else origin.rank


def failure_of(error: BaseException, topology: Topology, task: str | None = None) -> Failure:
    """What ``error``, seen at ``topology`` while it ran ``task``, means for the pipeline."""
    if isinstance(error, PipelineAborted):
        return Failure(error.origin, error.__cause__)
    if isinstance(error, PeerLostError):
        # It began elsewhere: the frames in which this rank noticed it would bury the line that names the peer.
        return Failure(_origin(topology, error.peer, None, f"{type(error).__name__}: {error.reason}"))
    of_callers = isinstance(error, ProtocolError) and error.is_of_callers
    return Failure(_origin(topology, topology.rank, task, describe(error)), None if of_callers else error)


class AbortScope:
    """A block of one task, which a failure of the pipeline ends wherever it waits, as `asyncio.timeout` does.

    Raises `PipelineAborted` if any rank has failed, or fails meanwhile; what the block raises is a failure too.
    """

    def __init__(self, controller: AbortController, what: str) -> None:
        self._controller = controller
        self._what = what
        self._task: asyncio.Task[Any] | None = None
        self._is_cancelled = False

    async def __aenter__(self) -> None:
        self._controller.check()
        self._task = asyncio.current_task()
        self._controller.scope = self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        controller = self._controller
        controller.scope = None
        assert self._task is not None
        if self._is_cancelled:
            is_cancelled_again = self._task.uncancel() > 0
            if isinstance(error, asyncio.CancelledError) and is_cancelled_again:
                return  # by the caller too
        elif error is not None:
            if isinstance(error, asyncio.CancelledError) and self._task.cancelling():
                controller.fail(RrfpError(f"{self._what} was cancelled by its caller"))
                return
            # Here and not in the task that waits: there SystemExit would end the loop first.
            if (failure := failure_on_loop(error)) is None:
                return
            controller.fail(failure)
        if controller.failure is not None:
            raise controller.failure.error()

    def cancel(self) -> None:
        """The pipeline has failed: end the block, unless it is running now; then it ends where it waits next."""
        if asyncio.current_task() is self._task:
            asyncio.get_running_loop().call_soon(self._cancel_waiting)
        else:
            self._cancel_waiting()

    def _cancel_waiting(self) -> None:
        if self._controller.scope is self and self._task is not None:
            self._is_cancelled = True
            self._task.cancel()


class AbortController:
    """Ends one rank when any rank fails. All methods are called on the rank's loop.

    ``stop`` ends everything here, without waiting for the lane; it is called once, with the failure. ``text_of`` makes
    the text of a task.
    """

    def __init__(
        self,
        topology: Topology,
        transport: Transport,
        stop: Callable[[Failure], None],
        text_of: Callable[[Task], str] = str,
    ) -> None:
        #: Why the rank ended; None while it lives.
        self.failure: Failure | None = None
        self._topology = topology
        self._transport = transport
        self._stop = stop
        self._text_of = text_of
        #: What the caller waits for: the start, a step, or an all-gather between steps.
        self.scope: AbortScope | None = None
        self._broadcast: asyncio.Task[None] | None = None
        #: Called with the failure, once everything here has stopped.
        self.on_failure: Callable[[Failure], None] | None = None

    @property
    def is_awaited(self) -> bool:
        return self.scope is not None

    def check(self) -> None:
        """Raise the failure, if there is one, as `PipelineAborted`."""
        if self.failure is not None:
            raise self.failure.error()

    def check_unraised(self) -> None:
        """Raise the failure unless a call has already raised it. Errors as in `check`."""
        if self.failure is not None and not self.failure.was_raised:
            raise self.failure.error()

    def during(self, what: str) -> AbortScope:
        """A block in which the caller waits for ``what``; see `AbortScope`."""
        return AbortScope(self, what)

    def fail(self, error: BaseException, task: Task | None = None) -> None:
        """End the pipeline on every rank because of ``error`` on this one. Only the first failure counts."""
        self.abort(failure_of(error, self._topology, None if task is None else self._text_of(task)))

    def on_message(self, message: Message) -> None:
        """An ABORT arrived: a failure on another rank."""
        self.abort(Failure(origin_of(message.body)))

    def abort(self, failure: Failure) -> None:
        """Stop everything here, and notify the peers."""
        if self.failure is not None:
            return
        self.failure = failure
        # First, because stopping may raise: a lane may be a plugin.
        self._broadcast = asyncio.create_task(broadcast_abort(self._transport, failure.origin))
        if self.scope is not None:
            self.scope.cancel()
        self._stop(failure)
        if self.on_failure is not None:
            self.on_failure(failure)

    async def close_transport(self) -> None:
        """Free the transport: in order, or once the peers know of the failure."""
        if self._broadcast is None:
            await self._transport.close()
        else:
            await self._broadcast


def origin_of(body: Mapping[str, Any]) -> Origin:
    """The origin that an ABORT message names; a ProtocolError if it names none."""
    match body:
        case {"stage": int(stage), "task": str() | None as task, "cause": str(cause), "rank": int() | None as rank}:
            return Origin(stage, task, cause, rank)
    raise ProtocolError("an abort arrived without stage, task and cause")


async def broadcast_abort(transport: Transport, origin: Origin) -> None:
    """Notify every peer, then free the transport. Takes `ABORT_GRACE_S` at most and raises nothing.

    A peer that the message does not reach sees this rank's end as lost, because the transport is then not closed in
    order.
    """
    message = Message(Channel.CONTROL, MessageKind.ABORT, body=asdict(origin))
    try:
        async with asyncio.timeout(timeouts.ABORT_GRACE_S):
            sends = (transport.send(peer, message) for peer in transport.context.peers)
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
            if all(outcome is None or isinstance(outcome, PeerLostError) for outcome in outcomes):
                await transport.close()
    except Exception as error:  # a transport may be a plugin, and there is a failure to report already
        logger.debug("sending a failure to the peers failed: %r", error)
    finally:
        transport.abort()


def _origin(topology: Topology, rank: int, task: str | None, cause: str) -> Origin:
    named_rank = rank if topology.world > topology.stages else None
    return Origin(topology.place_of(rank).stage, task, cause, named_rank)


def describe(error: BaseException) -> str:
    """One text, whatever the exception does: it may be huge, no valid Unicode, or raise in ``str``. With its notes."""
    try:
        said = error.faults if isinstance(error, ConfigError) and error.faults else (error,)
        text = "; ".join(filter(None, map(str, (*said, *getattr(error, "__notes__", ())))))
    except Exception as broken:
        text = f"(str() failed: {type(broken).__name__})"
    name = type(error).__name__
    full = (f"{name}: {text}" if text else name).encode(errors="backslashreplace").decode()
    return full if len(full) <= MAX_CAUSE else f"{full[:MAX_CAUSE]} ... ({len(full)} characters)"
