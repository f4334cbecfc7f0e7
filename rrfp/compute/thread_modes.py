"""The modes and hooks that torch keeps for each thread: read on one thread, entered on another.

torch has no public functions for that. All private names of torch that are needed stand in this file. They are tried
once; if one does not work, nothing is carried over, and `out_of_reach` says so.
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

#: The functions that pack and unpack a tensor that autograd saves.
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

#: Held while a caller's modes are entered: they are the caller's objects, and a process may have several lanes.
_entering = threading.Lock()


@dataclass(frozen=True, slots=True)
class ThreadModes:
    """The modes and hooks that are active on a thread, innermost last."""

    #: Torch-function modes, without the default device.
    functions: tuple[Any, ...]
    #: Dispatch modes, such as those that count operations.
    dispatch: tuple[Any, ...]
    #: The innermost default hooks for saved tensors; torch calls no others.
    hooks: Hooks | None

    @classmethod
    def read(cls) -> ThreadModes | None:
        """Those of the calling thread; None if there are none, or if this torch does not allow reading them."""
        private = _private()
        if private is None:
            return None
        functions = tuple(mode for mode in private.functions() if not isinstance(mode, DeviceContext))
        modes = cls(functions, tuple(private.dispatch()), private.hooks(False))
        return modes if modes.functions or modes.dispatch or modes.hooks is not None else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within, they are active on the calling thread too; one thread of the process at a time."""
        # Why push them, and not enter them with `with`? The caller has entered them, and their __enter__ has side
        # effects.
        private = _private()
        assert private is not None, "modes were read, so they can be entered"
        with _entering, ExitStack() as stack:
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
    """The default saved-tensor hooks of the calling thread; None if there are none."""
    private = _private()
    return None if private is None else private.hooks(False)


def out_of_reach() -> str | None:
    """The state of the calling thread that does not act on tasks, with the remedy, as text; None if there is none."""
    clauses: list[str] = []
    is_profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: False)
    if is_profiled():  # false if the profiler records all threads
        clauses.append(
            "the profiler records the calling thread only, and tasks run on threads of their own: give "
            "torch.profiler.profile the argument "
            "experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)"
        )
    if _private() is None:
        clauses.append(
            f"torch {torch.__version__} does not let torch-function modes, dispatch modes and saved-tensor hooks be "
            "read, so those of the caller do not act on tasks: enter them inside the module's forward"
        )
    return "; ".join(clauses) or None


class _Private(NamedTuple):
    """Private functions of torch."""

    #: The calling thread's torch-function modes.
    functions: Callable[[], Sequence[Any]]
    #: Enters a torch-function mode.
    push_function: Callable[[Any], object]
    #: Leaves the last one.
    pop_function: Callable[[], object]
    #: The calling thread's dispatch modes.
    dispatch: Callable[[], Sequence[Any]]
    #: Enters a dispatch mode.
    push_dispatch: Callable[[Any], object]
    #: Leaves the last one of a kind; None is the kind of user modes.
    pop_dispatch: Callable[[Any], object]
    #: The innermost default hooks; its argument is for compilers.
    hooks: Callable[[bool], Hooks | None]


@lru_cache(maxsize=1)
def _private() -> _Private | None:
    """The private functions; None if this version of torch lacks one, or one behaves otherwise."""
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
    """Whether entered modes and hooks can be read on this thread, and are gone after leaving."""
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
