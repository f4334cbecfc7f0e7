"""The caller's thread-local torch state, applied on the lane's thread.

torch keeps autocast, the grad mode, the default device, the current CUDA device, the number of threads, its stacks of
modes and the hooks for saved tensors per thread, so the lane's thread does not see the settings around the caller's
``step``. The profiler cannot be applied: torch attaches it to its own thread; see `out_of_reach`.

torch has no public functions for modes and hooks. All private names of torch that are needed stand in this file. They
are tried once; if one does not work, nothing is carried over, and `out_of_reach` says so.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext

from rrfp.errors import ConfigError
from rrfp.model.tasks import Mode

#: The functions that pack and unpack a tensor that autograd saves.
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

#: Where torch keeps its functions for modes, which have no types.
_functions: Any = torch.overrides
_dispatches: Any = _python_dispatch

#: Reads the innermost default hooks; its argument is for compilers.
_top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

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
        """Those of the calling thread; None if there are none, or none can be read."""
        if not _are_readable():
            return None
        functions, dispatch, hooks = _active()
        modes = cls(tuple(mode for mode in functions if not isinstance(mode, DeviceContext)), tuple(dispatch), hooks)
        return modes if modes.functions or modes.dispatch or modes.hooks is not None else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within, they are active on the calling thread too; one thread at a time."""
        # Why push them, and not enter them with `with`? The caller has entered them, and their __enter__ has side
        # effects.
        with _entering, ExitStack() as stack:
            for mode in self.functions:
                _functions._push_mode(mode)
                stack.callback(_functions._pop_mode)
            for mode in self.dispatch:
                _dispatches._push_mode(mode)
                stack.callback(_dispatches._pop_mode, getattr(mode, "_mode_key", None))
            if self.hooks is not None:
                stack.enter_context(saved_tensors_hooks(*self.hooks))
            yield


def saved_tensor_hooks() -> Hooks | None:
    hooks: Hooks | None = _top_hooks(False) if _are_readable() else None
    return hooks


def out_of_reach() -> str | None:
    """The caller's state that does not act on tasks, with the remedy; or None."""
    clauses: list[str] = []
    is_profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: False)
    if is_profiled():  # false if the profiler records all threads
        clauses.append(
            "the profiler records the calling thread only, and tasks run on threads of their own: give "
            "torch.profiler.profile the argument "
            "experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)"
        )
    if not _are_readable():
        clauses.append(
            f"torch {torch.__version__} does not let torch-function modes, dispatch modes and saved-tensor hooks be "
            "read, so those of the caller do not act on tasks: enter them inside the module's forward"
        )
    return "; ".join(clauses) or None


@lru_cache(maxsize=1)
def _are_readable() -> bool:
    """Whether this version of torch has all private functions, and they do what they did."""
    try:
        return _modes_work()
    except (AttributeError, TypeError, ValueError, RuntimeError, AssertionError):
        return False


def _modes_work() -> bool:
    """Whether modes can be read on this thread, and are gone after leaving."""
    function, dispatch = _functions.TorchFunctionMode(), _dispatches.TorchDispatchMode()
    hooks: Hooks = (_same, _same)
    before = _active()
    _functions._push_mode(function)
    try:
        _dispatches._push_mode(dispatch)
        try:
            with saved_tensors_hooks(*hooks):
                functions, dispatches, found = _active()
                is_read = functions[-1] is function and dispatches[-1] is dispatch and found == hooks
        finally:
            _dispatches._pop_mode(None)
    finally:
        _functions._pop_mode()
    return is_read and before == _active()


def _active() -> tuple[Sequence[Any], Sequence[Any], Hooks | None]:
    """The calling thread's torch-function modes, dispatch modes, and innermost default hooks."""
    functions, dispatches = _functions._get_current_function_mode_stack, _dispatches._get_current_dispatch_mode_stack
    return functions(), dispatches(), _top_hooks(False)


def _same(value: Any) -> Any:
    return value


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CallerModes:
    """The state of the thread that called a step.

    Attributes:
        mode: training or forward only; decides the grad mode.
        autocast: device types with autocast enabled, and the dtype of each.
        autocast_cache: whether autocast caches cast weights; the cache lasts for one task.
        device: the default device, None if it is the CPU.
        cuda_device: index of the current CUDA device, None if CUDA is not in use.
        num_threads: threads that one operator may use on the CPU.
        context: the context variables.
        carried: torch-function and dispatch modes and saved-tensor hooks, None if there are none.
    """

    mode: Mode
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    device: torch.device | None
    cuda_device: int | None
    num_threads: int
    context: contextvars.Context
    carried: ThreadModes | None = None

    @classmethod
    def capture(cls, mode: Mode) -> CallerModes:
        """Read the state of the calling thread.

        Args:
            mode: training or forward only.

        Raises:
            ConfigError: in a training step, if gradients are switched off.
        """
        if mode is Mode.TRAIN and not torch.is_grad_enabled():
            grad_mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
            raise ConfigError(
                f"step trains, but was called under torch.{grad_mode}(); use evaluate for a forward pass only"
            )
        device = torch.get_default_device()
        return cls(
            mode=mode,
            autocast=tuple((kind, torch.get_autocast_dtype(kind)) for kind in autocast_device_types()),
            autocast_cache=torch.is_autocast_cache_enabled(),
            device=None if device.type == "cpu" else device,
            cuda_device=_cuda_device(),
            num_threads=torch.get_num_threads(),
            context=contextvars.copy_context(),
            carried=ThreadModes.read(),
        )

    def forward(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` in the caller's state, with gradients enabled in a training step only.

        Args:
            function: called on this thread; returns its result.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        return self._run(self.autocast, function, *args, **kwargs)

    def backward(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """As `forward`, but outside autocast.

        Args:
            function: called on this thread; returns its result.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        # Why without autocast? torch advises against backward under it: backward operators run in the types that
        # autocast chose in forward. A step has both inside the caller's `with torch.autocast(...)`.
        return self._run((), function, *args, **kwargs)

    def _run(
        self,
        autocast: Collection[tuple[str, torch.dtype]],
        function: Callable[P, T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        outside, wanted = torch.is_grad_enabled(), self.mode is Mode.TRAIN
        if outside is not wanted:
            torch.set_grad_enabled(wanted)
        try:
            if torch.get_num_threads() != self.num_threads:
                torch.set_num_threads(self.num_threads)
            if not autocast and self.cuda_device is None and self.device is None and self.carried is None:
                return self.context.run(function, *args, **kwargs)  # the common case
            with self._settings(autocast):
                return self.context.run(function, *args, **kwargs)
        finally:  # a module may have switched it too
            if torch.is_grad_enabled() is not outside:
                torch.set_grad_enabled(outside)

    @contextmanager
    def _settings(self, autocast: Collection[tuple[str, torch.dtype]]) -> Iterator[None]:
        with ExitStack() as stack:
            if self.cuda_device is not None:
                stack.enter_context(torch.cuda.device(self.cuda_device))
            if self.device is not None:  # a default device costs every call from Python about a microsecond
                stack.enter_context(self.device)
            for device_type, dtype in autocast:
                stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=self.autocast_cache))
            # Last, so that the caller's modes do not see the other settings being made.
            if self.carried is not None:
                stack.enter_context(self.carried.entered())
            yield


def autocast_device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    candidates = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return tuple(kind for kind in candidates if torch.is_autocast_enabled(kind))


def _cuda_device() -> int | None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None  # asking for the current device would initialise CUDA
    return torch.cuda.current_device()
