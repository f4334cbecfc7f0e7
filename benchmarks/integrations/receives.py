"""How a RECV of torch's schedules behaves on an accelerator, emulated over gloo, where it is only posted.

The schedules of ``torch.distributed.pipelining`` start all their P2P operations through one private function; it is
replaced while one of them runs a step. RRFP posts none, and its steps run without the replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules

from benchmarks.integrations.settings import Receives

#: Starts a batch of operations; what it returns is waited for.
_Post = Callable[..., Sequence[Any]]

#: The module whose function is replaced.
_SCHEDULES: Any = schedules
_POST: _Post = _SCHEDULES._batch_p2p


class _Queued:
    """A batch in a stream."""

    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def wait(self) -> None:
        self._done.result()


def _complete(ops: list[dist.P2POp]) -> None:
    for work in _POST(ops):
        work.wait()


def _in_stream(stream: ThreadPoolExecutor) -> _Post:
    def post(ops: list[dist.P2POp], desc: str | None = None) -> Sequence[Any]:
        return [_Queued(stream.submit(_complete, ops))] if ops else []

    return post


def _occupying(ops: list[dist.P2POp], desc: str | None = None) -> Sequence[Any]:
    if not any(op.op is dist.irecv for op in ops):
        return _POST(ops)
    _complete(ops)
    return []  # gloo's operations may be waited for only once


@contextmanager
def emulated(receives: Receives) -> Iterator[None]:
    """While it is entered, RECVs of torch's schedules in this process behave like ``receives``.

    In one stream, a rank's batches run one after the other, each to its end, as on one stream of NCCL: a SEND waits
    behind a RECV that was posted before it. Where a RECV occupies the rank, nothing else runs until it has landed, as
    where its kernel keeps the collectives of a forward from starting.
    """
    if receives is Receives.POSTED:
        yield
        return
    with ThreadPoolExecutor(1, thread_name_prefix="p2p-stream") as stream:
        _SCHEDULES._batch_p2p = _occupying if receives is Receives.OCCUPIED else _in_stream(stream)
        try:
            yield
        finally:
            _SCHEDULES._batch_p2p = _POST
