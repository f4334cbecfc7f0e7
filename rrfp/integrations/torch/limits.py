"""A time limit for calls of torch that block until all ranks make them, and have none of their own worth the name."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist

from rrfp.errors import TransportError
from rrfp.integrations.torch.private import Stage

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The default of ``init_timeout``, in seconds: the first step of a rank may compile its stages.
INIT_S = 600.0


#: Between two looks at the pipeline, in seconds.
LOOK_S = 0.1


#: For whom a call waits, where that is unknown.
UNKNOWN = "some rank of the stages' group does not call it, or failed in it; "


#: After how many seconds a log line says that a call waits.
WARN_S = 10.0


def within(
    seconds: float,
    what: str,
    call: Callable[[], T],
    check: Callable[[], None] = lambda: None,
    missing: Callable[[], str] = str,
    *,
    warn_s: float = WARN_S,
) -> T:
    """The result of ``call``, made on a thread of its own, unless ``check`` raises meanwhile; logs a long wait once.

    ``missing`` says for whom the call waits, as the beginning of a sentence; empty if unknown.
    """
    outcome: Future[T] = Future()
    thread = threading.Thread(target=_run, args=(call, outcome), name=f"rrfp-{what}", daemon=True)
    thread.start()
    deadline, warning = time.monotonic() + seconds, time.monotonic() + warn_s
    while not wait([outcome], min(LOOK_S, max(0.0, deadline - time.monotonic()))).done:
        check()
        if time.monotonic() >= warning:
            warning = float("inf")
            logger.warning(
                "%s has not ended for %g s, and may take %g s (init_timeout): %sit waits until every rank of the "
                "stages' group has built its ScheduleRRFP and called step or eval as often; here it is %s",
                what,
                warn_s,
                seconds,
                missing(),
                _place_of(thread),
            )
        if time.monotonic() >= deadline:
            raise TransportError(
                f"{what} did not end within init_timeout, {seconds:g} s: {missing() or UNKNOWN}here it waits "
                f"{_place_of(thread)}"
            )
    if outcome.exception() is not None:
        check()  # a peer that failed has closed its connections, too: the failure says more
    return outcome.result()


def _run(call: Callable[[], Any], outcome: Future[Any]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:
        outcome.set_exception(error)


def _place_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    frames = [] if frame is None else traceback.extract_stack(frame)[-3:]
    return " < ".join(f"in {each.name} ({each.filename}:{each.lineno})" for each in reversed(frames))


#: For how many seconds a waiting rank asks who is missing: the store may be gone.
ASK_S = 5.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """Something that blocks until all ranks of a group do it."""

    name: str
    #: Of the exchange in the group's store; not the same as that of any other kind of exchange there.
    key: str
    #: What a rank does to come to it, in words that follow "has not".
    duty: str


#: When a schedule is built.
STAGES = Exchange("the exchange of the ranks' stages", "stages", "built its ScheduleRRFP")


def shapes_of(token: int) -> Exchange:
    """Before the first step of a schedule, whose own number ``token`` is."""
    return Exchange("the exchange of shapes between stages", f"shapes/{token:x}", "called step or eval")


class ReceiveWatch:
    """Who has come to the exchanges of one kind, in the store of the stages' group.

    Ranks come to exchanges of one kind one after the other, and count them, so the nth of one rank is that of all.
    What fails here is passed over: it would only have made a message better.
    """

    def __init__(self, stage: Stage, exchange: Exchange) -> None:
        group: Any = dist.group.WORLD if stage.group is None else stage.group
        self._rank, self._ranks = stage.group_rank, stage.group_size
        self._exchange = exchange
        self._key = ""
        self._store: Any = _attempt(lambda: group.get_group_store())

    @property
    def name(self) -> str:
        return self._exchange.name

    def come(self) -> None:
        """This rank has come to the next exchange."""

        def write() -> str:
            prefix = f"rrfp/{self._exchange.key}"
            key = f"{prefix}/{self._store.add(f'{prefix}/of/{self._rank}', 1)}"
            self._store.append(key, f"{self._rank} ")
            return key

        self._key = _attempt(write) or ""

    def missing(self) -> str:
        """Who has not come to the exchange that this rank came to last, in words; empty where the store does not say.

        May take `ASK_S` seconds. Another thread may wait for the store.
        """
        answer: Future[str | None] = Future()
        Thread(target=lambda: answer.set_result(_attempt(self._read)), daemon=True).start()
        return self._named(answer.result() or "") if wait([answer], ASK_S).done else ""

    def _read(self) -> str:
        # A store's own connection may be taken by a call that waits.
        return bytes(self._store.clone().get(self._key)).decode() if self._key else ""

    def _named(self, came: str) -> str:
        if not came:
            return ""
        absent = sorted({*range(self._ranks)} - {*map(int, came.split())})
        if not absent:
            return "every rank of the stages' group has come to it; "
        ranks = f"rank {absent[0]} has" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))} have"
        return f"of the stages' group {ranks} not {self._exchange.duty}; "


def _attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (RuntimeError, NotImplementedError, AttributeError, ValueError):  # torch's errors of stores are the first
        return None
