"""The modes and hooks that torch keeps for each thread: read on one thread, entered on another.

torch has no public way to carry them. Every private name of torch that this takes stands in this file. They are tried
once; where they do not work, nothing is carried, and `out_of_reach` says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._device import DeviceContext

#: What packs a tensor that autograd saves, and what unpacks it.
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

#: Held while modes of a caller are entered: they are objects of the caller's, and the lanes of one process are several.
_turn = threading.Lock()


@dataclass(frozen=True, slots=True)
class ThreadModes:
    """What is active on a thread, innermost last.

    Attributes:
        functions: torch-function modes, without the default device.
        dispatch: dispatch modes, such as those that count operations.
        hooks: the innermost default hooks for saved tensors, the only ones that torch calls.
    """

    functions: tuple[Any, ...]
    dispatch: tuple[Any, ...]
    hooks: Hooks | None

    @classmethod
    def read(cls) -> ThreadModes | None:
        """Those of the calling thread; None where there are none, or where this torch does not let them be read."""
        private = _private()
        if private is None:
            return None
        functions = tuple(mode for mode in private.functions() if not isinstance(mode, DeviceContext))
        modes = cls(functions, tuple(private.dispatch()), private.hooks(False))
        return modes if modes.functions or modes.dispatch or modes.hooks is not None else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within, they are active on the calling thread too. Only one thread of the process is within at a time.

        A mode's own ``__enter__`` is not called again: what it sets up is set up already.
        """
        private = _private()
        assert private is not None, "modes were read, so they can be entered"
        with _turn, ExitStack() as stack:
            for mode in self.functions:
                private.push_function(mode)
                stack.callback(private.pop_function)
            for mode in self.dispatch:
                private.push_dispatch(mode)
                stack.callback(private.pop_dispatch, getattr(mode, "_mode_key", None))
            if self.hooks is not None:
                stack.enter_context(saved_tensors_hooks(*self.hooks))
            yield


def saved_tensor_hooks() -> Hooks | None:
    """The hooks that the calling thread's saved tensors go through by default."""
    private = _private()
    return None if private is None else private.hooks(False)


def out_of_reach() -> str | None:
    """What of the calling thread's does not act on tasks, and how to get it, in words; None where there is nothing."""
    found: list[str] = []
    is_profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: False)
    if is_profiled():  # not so where the profiler records all threads
        found.append(
            "the profiler records the calling thread only, and tasks run on threads of their own: give "
            "torch.profiler.profile the argument "
            "experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)"
        )
    if _private() is None:
        found.append(
            f"torch {torch.__version__} does not let torch-function modes, dispatch modes and saved-tensor hooks be "
            "read, so those of the caller do not act on tasks: enter them inside the module's forward"
        )
    return "; ".join(found) or None


class _Private(NamedTuple):
    """Private functions of torch.

    Attributes:
        functions: the calling thread's torch-function modes.
        push_function: adds one.
        pop_function: takes the last away.
        dispatch: the calling thread's dispatch modes.
        push_dispatch: adds one.
        pop_dispatch: takes one away: the last of its kind, None for those of users.
        hooks: the innermost default hooks; its argument is for compilers.
    """

    functions: Callable[[], Sequence[Any]]
    push_function: Callable[[Any], object]
    pop_function: Callable[[], object]
    dispatch: Callable[[], Sequence[Any]]
    push_dispatch: Callable[[Any], object]
    pop_dispatch: Callable[[Any], object]
    hooks: Callable[[bool], Hooks | None]


@lru_cache(maxsize=1)
def _private() -> _Private | None:
    """The private functions, or None where this version of torch lacks one or it does something else."""
    try:
        from torch import overrides
        from torch.utils import _python_dispatch as dispatch

        private = _Private(
            overrides._get_current_function_mode_stack,
            overrides._push_mode,
            overrides._pop_mode,
            dispatch._get_current_dispatch_mode_stack,
            dispatch._push_mode,
            dispatch._pop_mode,
            torch._C._autograd._top_saved_tensors_default_hooks,
        )
        function, dispatched = overrides.TorchFunctionMode(), dispatch.TorchDispatchMode()  # type: ignore[no-untyped-call]
        return private if _works(private, function, dispatched) else None
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, AssertionError):
        return None


def _works(private: _Private, function: Any, dispatch: Any) -> bool:
    """Whether what is entered on this thread can be read, and is gone afterwards."""
    hooks: Hooks = (_same, _same)
    before = private.functions(), private.dispatch(), private.hooks(False)
    private.push_function(function)
    try:
        private.push_dispatch(dispatch)
        try:
            with saved_tensors_hooks(*hooks):
                is_read = private.functions()[-1] is function and private.dispatch()[-1] is dispatch
                is_read = is_read and private.hooks(False) == hooks
        finally:
            private.pop_dispatch(None)
    finally:
        private.pop_function()
    return is_read and before == (private.functions(), private.dispatch(), private.hooks(False))


def _same(value: Any) -> Any:
    return value
