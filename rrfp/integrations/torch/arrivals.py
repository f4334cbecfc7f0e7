"""Which ranks have come to an exchange of torch's: those that wait can say for whom."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch.distributed as dist

from rrfp.integrations.torch.private import Stage

#: For how many seconds a waiting rank asks who is missing: the store may be gone.
ASK_S = 5.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """Something that blocks until all ranks of a group do it.

    Attributes:
        name: for messages.
        key: of the exchange in the group's store; not the same as that of any other kind of exchange there.
        duty: what a rank does to come to it, in words that follow "has not".
    """

    name: str
    key: str
    duty: str


#: When a schedule is built.
STAGES = Exchange("the exchange of the ranks' stages", "stages", "built its ScheduleRRFP")


def shapes_of(token: int) -> Exchange:
    """Before the first step of a schedule, whose own number ``token`` is."""
    return Exchange("the exchange of shapes between stages", f"shapes/{token:x}", "called step or eval")


class Arrivals:
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
        """The exchange's."""
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
        done, _ = wait([answer], ASK_S)
        return self._named(answer.result() or "") if done else ""

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
