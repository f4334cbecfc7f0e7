"""When Megatron's wrappers reduce gradients in a step: around the last backward of each chunk, as in its schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

SyncFunction = Callable[..., Any]


class GradientSync:
    """Leaves and enters ``config.no_sync_func``, and calls ``config.grad_sync_func``.

    Inside ``no_sync_func`` the hooks of `DistributedDataParallel` only add gradients up. With one chunk it is left
    before the last backward, whose hooks then reduce; with a ``grad_sync_func``, which the caller wants to overlap with
    what earlier stages still compute, it is left after it on all stages but the first, and that function reduces. With
    several chunks it is left for the last backward of each, and entered again; or ``grad_sync_func`` of the chunk is
    called after it. Made when a step begins, on the caller's thread; used on the lane's.

    Replicas call these in one order, deepest chunk first, whatever the order of their tasks: the last backward of a
    chunk needs the gradient of the last backward of the next one.
    """

    def __init__(self, config: Any, chunks: Sequence[nn.Module], microbatches: int, *, is_first_stage: bool) -> None:
        self._chunks = chunks
        self._enter = _listed(config.no_sync_func)
        syncs = _listed(config.grad_sync_func)
        #: By chunk, what reduces its gradients; None: the hooks of its last backward.
        self._reduce = syncs * len(chunks) if len(syncs) == 1 else syncs
        self._hooks_reduce = not syncs or (len(chunks) == 1 and is_first_stage)
        self._left = [microbatches] * len(chunks)
        self._inside = ExitStack()
        self._open()

    def before_backward(self, chunk: int) -> None:
        self._left[chunk] -= 1
        if not self._left[chunk] and self._hooks_reduce:
            self._inside.close()

    def after_backward(self, chunk: int) -> None:
        if self._left[chunk]:
            return
        if not self._hooks_reduce:
            self._inside.close()
            self._reduce[chunk](self._chunks[chunk].parameters())
        if any(self._left):
            self._open()

    def close(self) -> None:
        self._inside.close()

    def _open(self) -> None:
        for enter in self._enter:
            self._inside.enter_context(enter())


class ParameterSync:
    """Calls ``config.param_sync_func`` of each chunk ahead of its first forward; with several chunks only."""

    def __init__(self, config: Any, chunks: Sequence[nn.Module]) -> None:
        syncs = _listed(config.param_sync_func) if len(chunks) > 1 else []
        self._syncs = syncs * len(chunks) if len(syncs) == 1 else syncs
        self._chunks = chunks
        #: The chunks whose parameters were gathered.
        self._begun = 0
        self.ahead_of(0)

    def ahead_of(self, chunk: int) -> None:
        """The first forward of ``chunk`` is about to run; those of lower chunks have run."""
        while self._begun < min(chunk + 2, len(self._syncs)):
            self._syncs[self._begun](self._chunks[self._begun].parameters())
            self._begun += 1


def _listed(functions: SyncFunction | Sequence[SyncFunction] | None) -> list[SyncFunction]:
    if functions is None:
        return []
    return list(functions) if isinstance(functions, list | tuple) else [functions]  # type: ignore[list-item]
