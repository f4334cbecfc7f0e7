"""The status socket of a process: a program that connects gets one line, a `JobReport`, and the connection ends.

Nothing is read from it, so nothing that it sends matters. It must run as the same user: only that one may enter the
folder, and the kernel's credentials of each connection are compared. A pause between two connections bounds the part of
the loop's time that a program can take. While none connects the loop has one descriptor more, and nothing to do.
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from rrfp import timeouts
from rrfp.host import KNOWS_USERS, peer_credentials
from rrfp.log import get_logger
from rrfp.runtime.status_socket.folder import SocketFile, make_folder, sockets_in
from rrfp.runtime.status_socket.report import JobReport

T = TypeVar("T")

logger = get_logger(__name__)

#: Programs that are answered at a time; as many others wait in the socket's backlog.
MOST_READERS = 4


class StatusServer:
    """Serves one process. Used on one loop only."""

    def __init__(self, folder: Path, job: str, rank: int, report: Callable[[], Awaitable[JobReport]]) -> None:
        self.file = SocketFile.of(folder, job, rank)
        self._report = report
        self._socks: set[socket.socket] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        #: The answer that is being made, or the last one.
        self._answer: asyncio.Task[bytes] | None = None
        self._remove = weakref.finalize(self, self.file.remove_own)  # also where the program ends without leaving
        _servers.add(self)

    def start(self) -> None:
        """Listen, and remove what killed processes have left."""
        if not KNOWS_USERS:
            raise OSError("this system does not tell the user at the other end of a socket")
        folder = self.file.path.parent
        make_folder(folder)
        sockets_in(folder)
        listener = socket.socket(socket.AF_UNIX)
        self._socks.add(listener)
        try:
            listener.setblocking(False)
            # A file under the last name has a listener from the first moment: it is never taken for a stale one.
            unready = folder / f".{self.file.path.name}"
            unready.unlink(missing_ok=True)
            listener.bind(os.fspath(unready))
            listener.listen(MOST_READERS)
            unready.rename(self.file.path)
        except BaseException:
            self._end(listener)
            raise
        self._spawn(self._accept(listener))

    async def close(self) -> None:
        """Stop, and remove the file. May be called twice."""
        self._remove()
        if running := list(self._tasks):
            for task in running:
                task.cancel()
            await asyncio.wait(running)
        for sock in list(self._socks):  # of tasks that had not begun
            self._end(sock)

    def forget(self) -> None:
        """In a forked child: the connections are the parent's, and must end with it."""
        for sock in self._socks:
            with suppress(OSError):
                os.close(sock.detach())

    async def _accept(self, listener: socket.socket) -> None:
        loop, free = asyncio.get_running_loop(), asyncio.Semaphore(MOST_READERS)
        try:
            while True:
                await free.acquire()
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError:  # no descriptor is left, for example
                    free.release()
                else:
                    self._socks.add(sock)
                    self._spawn(self._serve(sock)).add_done_callback(lambda _: free.release())
                await asyncio.sleep(timeouts.STATUS_PAUSE_S)
        finally:
            self._end(listener)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            async with asyncio.timeout(timeouts.STATUS_S):
                line = _refusal(sock) or await self._line()
            async with asyncio.timeout(timeouts.STATUS_READ_S):
                await asyncio.get_running_loop().sock_sendall(sock, line)
        except (OSError, TimeoutError):  # the program has ended, or does not read
            pass
        except Exception as error:  # a look must not end the job, whatever the code plugged into it does
            logger.warning("the status of the job could not be reported: %r", error)
        finally:
            self._end(sock)

    async def _line(self) -> bytes:
        """The answer; programs that connect while it is being made get the same one."""
        if self._answer is None or self._answer.done():
            self._answer = self._spawn(self._make())
        return await asyncio.shield(self._answer)

    async def _make(self) -> bytes:
        return (await self._report()).line()

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine, name="rrfp-status")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _end(self, sock: socket.socket) -> None:
        self._socks.discard(sock)
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


def _refusal(sock: socket.socket) -> bytes:
    """The line for a program of another user; empty for this one's."""
    _, user = peer_credentials(sock)
    if user == os.geteuid():
        return b""
    return JobReport(os.getpid(), "", failure=f"user {user} may not look at a job of user {os.geteuid()}").line()


_servers: weakref.WeakSet[StatusServer] = weakref.WeakSet()


def _forget_all() -> None:
    for server in list(_servers):
        server.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
