"""A rank that cannot start says so through the rendezvous: the others would wait for it until their time is up.

Once ranks are connected a failure travels as an abort, and what is in the store has no effect any more. Without a
secret any program may have written it, so an error that follows from it says where it comes from.
"""

from __future__ import annotations

import asyncio
import atexit
import hmac
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

from rrfp import timeouts
from rrfp.compute.tracebacks import print_no_traceback
from rrfp.errors import PipelineAborted, ProtocolError, RrfpError, TransportError
from rrfp.host import ProcessIdentity, ended
from rrfp.log import get_logger
from rrfp.model.topology import Topology
from rrfp.runtime import records
from rrfp.runtime.abort import describe
from rrfp.runtime.start.handshake import printable
from rrfp.transports.base import Rendezvous
from rrfp.transports.rendezvous import StoreRendezvous
from rrfp.transports.secret import Secret, split_voucher, vouch

logger = get_logger(__name__)

T = TypeVar("T")

#: Of the vouchers; see `vouch`.
_PURPOSE = "rrfp failed start 1"

#: A rank's reason is cut, in characters.
_MOST_CHARACTERS = 2000

#: More than a failed start with such a reason has, in bytes.
_MOST_BYTES = 16 * _MOST_CHARACTERS

#: Rendezvous over which this process reported a failure: it may host their store, which others read until it ends.
_kept: list[Rendezvous] = []


@dataclass(frozen=True, slots=True)
class FailedStart:
    """What a rank reports to the others."""

    rank: int
    #: Its error, in a line.
    reason: str
    process: ProcessIdentity


class _Reported(NamedTuple):
    """What this rank makes of another one's failed start: the text of an error, and the process to wait for."""

    text: str
    process: ProcessIdentity | None = None


class FailedStarts:
    """Of one rank of a pipeline: reports its own failed start to the others, and learns of theirs."""

    def __init__(
        self,
        topology: Topology,
        run_id: str,
        meet: Callable[[float], Awaitable[Rendezvous]],
        secret: Secret | None,
    ) -> None:
        #: Whether the error of this rank's start is one that all ranks raise: then no rank has to learn of it.
        self.is_known_to_all = False
        self._topology = topology
        self._meet = meet
        self._secret = secret
        self._key = f"failed/{run_id}/{topology.restart}"
        self._about = (_PURPOSE, run_id, topology.restart, self._key)
        self._rendezvous: Rendezvous | None = None
        self._has_met = asyncio.Event()

    async def meet(self, timeout_s: float) -> Rendezvous:
        self._rendezvous = await self._meet(timeout_s)
        self._has_met.set()
        return self._rendezvous

    def report_now(self, error: BaseException) -> None:
        """Tell the others of ``error``, before there is a loop. Raises nothing.

        A store that does not answer is given up after `ABORTED_S`. Where another rank prints the error, this one waits
        for the end of that.
        """
        if self._topology.world == 1:
            return
        has_reported = threading.Event()

        async def report() -> None:
            with suppress(Exception):  # no store, or one that is a plugin: there is an error to report already
                await self.meet(timeouts.NOTIFY_S)
                await self._report(error)
                has_reported.set()
                await self._leave_to_one(error)

        # On another thread, since this one may run a loop; it is left behind if the store does not answer.
        reporting = threading.Thread(target=partial(asyncio.run, report()), name="rrfp-failed-start", daemon=True)
        reporting.start()
        reporting.join(timeouts.ABORTED_S)
        if has_reported.is_set():
            reporting.join()

    async def unless_reported(self, start: Coroutine[Any, Any, T]) -> T:
        """Wait for ``start`` of this rank, and report it to the others if it fails."""
        if self._topology.world == 1:
            return await start
        starting, listening = asyncio.create_task(start), asyncio.create_task(self._listen())
        try:
            await asyncio.wait({starting, listening}, return_when=asyncio.FIRST_COMPLETED)
            if listening.done() and not starting.done():
                await self._raise(listening.result())
            try:
                return await starting
            except PipelineAborted:  # which travelled over the transport
                raise
            except Exception as error:
                await self._failed(error, listening)
                raise
        finally:
            starting.cancel()
            listening.cancel()
            await asyncio.gather(starting, listening, return_exceptions=True)

    async def _failed(self, error: Exception, listening: asyncio.Task[_Reported]) -> None:
        """This rank's start failed: because of another rank that reports one, or for a reason of its own."""
        if isinstance(error, TransportError) and not self.is_known_to_all:
            # Such as a peer that is gone: it may have reported why.
            await asyncio.wait({listening}, timeout=2 * timeouts.LOOK_S)
            if listening.done():
                await self._raise(listening.result(), error)
        await self._report(error)
        await self._leave_to_one(error)

    async def _report(self, error: BaseException) -> None:
        if self._rendezvous is None:
            return
        reason = describe(error)[:_MOST_CHARACTERS]
        value = records.pack(FailedStart(self._topology.rank, reason, ProcessIdentity.own()))
        with suppress(TransportError, TimeoutError):
            async with asyncio.timeout(timeouts.NOTIFY_S):
                if await self._other_with(error, timeouts.GLANCE_S) is None:
                    await self._rendezvous.publish(self._reported_as, vouch(self._secret, value, *self._about))
        is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self._topology.rank == 0 and not is_hosted and isinstance(self._rendezvous, StoreRendezvous):
            if not _kept:
                atexit.register(_linger, time.monotonic() + timeouts.NOTIFY_S)
            _kept.append(self._rendezvous)

    async def _leave_to_one(self, error: BaseException) -> None:
        """Under torchrun, of ranks that all raise the same one prints its traceback: the one whose report has stayed.

        The others say so in one line, and let it end first.
        """
        if not _is_under_torchrun() or not isinstance(error, RrfpError):
            return
        await asyncio.sleep(timeouts.LOOK_S)  # ranks that failed at the same time have reported too
        if (other := await self._other_with(error, timeouts.LOOK_S)) is not None:
            await self._end_after(other, describe(error), error)

    async def _other_with(self, error: BaseException, timeout_s: float) -> ProcessIdentity | None:
        """The process of another rank that has reported an error of the same type, under torchrun."""
        if self._rendezvous is None or not _is_under_torchrun():
            return None
        try:
            failed, is_vouched = self._unpack(await self._rendezvous.lookup(self._reported_as, timeout_s))
        except (TransportError, ProtocolError):
            return None
        is_same = failed.reason.startswith(f"{type(error).__name__}:") and (is_vouched or self._secret is None)
        return failed.process if is_same and failed.rank != self._topology.rank else None

    @property
    def _reported_as(self) -> str:
        """The key of this rank's report; one that all know of must not reach those that wait for it."""
        return f"{self._key}/all" if self.is_known_to_all else self._key

    async def _listen(self) -> _Reported:
        """Wait until another rank reports that it cannot start."""
        await asyncio.sleep(timeouts.LOOK_S)  # ranks that start together need no look
        await self._has_met.wait()
        assert self._rendezvous is not None
        try:
            return self._read(await self._rendezvous.lookup(self._key, timeouts.LISTEN_S))
        except Exception:  # of the store, which the start itself notices
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    def _read(self, data: bytes) -> _Reported:
        try:
            failed, is_vouched = self._unpack(data)
            name = self._topology.name_of(failed.rank) if failed.rank in range(self._topology.world) else ""
        except ProtocolError:
            name = ""
        if not name:
            return _Reported(
                "the rendezvous store has a failed start that cannot be read: another program wrote to the store"
            )
        reason = printable(failed.reason, _MOST_CHARACTERS)
        if is_vouched:
            return _Reported(f"{name} cannot start: {reason}", failed.process)
        doubt = "" if self._secret is None else " (the secret of this job does not vouch for it)"
        return _Reported(f"{name} says, through the store: {reason}{doubt}", failed.process)

    def _unpack(self, data: bytes) -> tuple[FailedStart, bool]:
        """A failed start, and whether the secret vouches for it; a ProtocolError if it cannot be read."""
        voucher, value = split_voucher(data)
        failed = records.unpack(FailedStart, value[:_MOST_BYTES], "a failed start")
        if self._secret is None:
            return failed, False
        return failed, hmac.compare_digest(self._secret.mac(*self._about, value), voucher)

    async def _raise(self, reported: _Reported, cause: BaseException | None = None) -> NoReturn:
        """Raise it; under torchrun in one line, after the rank at fault."""
        error = TransportError(reported.text)
        if _is_under_torchrun() and reported.process is not None:
            await self._end_after(reported.process, reported.text, error)
        raise error from cause

    async def _end_after(self, process: ProcessIdentity, why: str, error: RrfpError) -> None:
        """Log that this rank ends, of which ``error`` prints no more; as `Session` does after an abort."""
        logger.error("%s ends: %s", self._topology.name, why)
        print_no_traceback(error)
        if await ended(process, ProcessIdentity.own(), timeouts.FAILED_PROCESS_GRACE_S):
            await asyncio.sleep(timeouts.LAUNCHER_LOOKS_S)


def _is_under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _linger(until_s: float) -> None:
    """Keep this process, which hosts the store, until the others have read it."""
    time.sleep(max(0.0, until_s - time.monotonic()))
