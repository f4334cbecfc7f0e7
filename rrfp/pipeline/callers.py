"""The two ways to wait for the runtime's loop: a caller awaits it, or blocks its thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from rrfp import timeouts
from rrfp.compute.tracebacks import from_here
from rrfp.errors import PipelineAborted, RrfpError
from rrfp.pipeline.calls import Call
from rrfp.pipeline.session import Session

T = TypeVar("T")


class AsyncCaller:
    """Enters, calls and leaves a session from a coroutine."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def enter(self) -> None:
        """Enter the pipeline, which is left again if its ranks do not start."""
        try:
            self._session.enter()
            try:
                await self._on_loop(self._session.start())
            except BaseException:
                await asyncio.shield(self._free())
                raise
        except RrfpError as error:
            raise from_here(error) from error.__cause__

    async def run(self, call: Call[T]) -> T:
        """Wait for ``call``; cancelling that ends the pipeline."""
        aborted: PipelineAborted | None = None
        try:
            outcome = await self._on_loop(call.rest)
        except PipelineAborted as error:
            aborted = error
        except asyncio.CancelledError:
            self._session.fail_soon(RrfpError(f"{call.name} was cancelled by its caller"))
            raise
        finally:
            self._session.gate.end()
        if aborted is not None:
            raise aborted.with_traceback(None)  # the runtime's frames would bury the caller's
        return call.finish(outcome)

    async def leave(self, error: BaseException | None) -> None:
        """Leave the pipeline because of ``error``, or in order."""
        if self._session.gate.is_foreign:
            return
        self._session.check_leaving()
        try:
            if error is None and self._session.is_open:
                await self.run(self._session.settle())
        except BaseException as unsettled:
            error = unsettled
            raise
        finally:
            await self._close(error)

    async def _close(self, error: BaseException | None) -> None:
        try:
            if self._session.has_given_up:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(timeouts.LEAVE_S):
                    closing = asyncio.create_task(self._on_loop(self._session.close(error)))
                    # Should the time be over, its error would go unread, which asyncio logs.
                    closing.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
                    await asyncio.shield(closing)
        finally:
            await asyncio.shield(self._free())

    async def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._session.thread is None:
            return await coroutine
        return await asyncio.wrap_future(self._session.submit(coroutine))

    async def _free(self) -> None:
        if self._session.thread is None:
            self._session.leave()
            await self._session.ranks.delivered()
        else:  # joining a thread would block the caller's loop
            await asyncio.to_thread(self._session.leave)


class BlockingCaller:
    """Enters, calls and leaves a session from a thread, which blocks meanwhile."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def enter(self) -> None:
        """As `AsyncCaller.enter`."""
        session = self._session
        try:
            session.enter()
            try:
                session.submit(session.start()).result()
            except BaseException:
                session.leave()
                raise
        except (RrfpError, KeyboardInterrupt) as error:
            raise from_here(error) from error.__cause__

    def run(self, call: Call[T]) -> T:
        """As `AsyncCaller.run`; an error that ends the wait, such as Ctrl-C, ends the pipeline."""
        session = self._session
        aborted: PipelineAborted | None = None
        try:
            outcome = session.submit(call.rest).result()
        except PipelineAborted as error:
            aborted = error
        except KeyboardInterrupt as interrupt:
            session.fail_soon(interrupt)
            raise from_here(interrupt) from None
        except BaseException as error:  # after a failure of the step itself this has no effect
            session.fail_soon(error)
            raise
        finally:
            session.gate.end()
        if aborted is not None:
            raise aborted.with_traceback(None)  # the runtime's frames would bury the caller's
        return call.finish(outcome)

    def leave(self, error: BaseException | None) -> None:
        """As `AsyncCaller.leave`."""
        if self._session.gate.is_foreign:
            return
        self._session.check_leaving()
        try:
            if error is None and self._session.is_open:
                self.run(self._session.settle())
        except BaseException as unsettled:
            error = unsettled
            raise
        finally:
            self._close(error)

    def share_overflow(self, own: bool) -> bool:
        """Whether gradients have overflowed on any rank, given whether they have in this process."""
        if self._session.thread_name is None:
            raise RrfpError(
                "the other ranks' gradients cannot be compared while this thread, whose loop serves the pipeline (loop "
                "is 'caller'), is blocked: await pipe.unscale_(optimizer) before scaler.step(optimizer)"
            )
        return self.run(self._session.between_steps.share_overflow(own))

    def _close(self, error: BaseException | None) -> None:
        try:
            if not self._session.has_given_up:
                _wait(self._session.submit(self._session.close(error)), timeouts.LEAVE_S)
        finally:
            self._session.leave()


def _wait(leaving: Future[None], timeout_s: float) -> None:
    """Wait until all resources are freed; a Ctrl-C meanwhile is raised afterwards."""
    deadline = time.monotonic() + timeout_s
    interrupt = None
    while True:
        try:
            with suppress(TimeoutError):
                leaving.result(max(0.0, deadline - time.monotonic()))
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
