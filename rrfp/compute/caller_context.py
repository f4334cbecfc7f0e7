"""The caller's thread-local torch state, applied on the lane's thread.

torch keeps autocast, the grad mode, the default device, the current CUDA device, the number of threads, its stacks of
modes and the hooks for saved tensors per thread, so the lane's thread does not see the settings around the caller's
``step``. The profiler cannot be applied: torch attaches it to its own thread; see
`rrfp.compute.thread_modes.out_of_reach`.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

from rrfp.compute.thread_modes import ThreadModes
from rrfp.errors import ConfigError
from rrfp.model.tasks import Mode

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
        outside, wanted = torch.is_grad_enabled(), self.mode is Mode.TRAIN
        if outside is not wanted:
            torch.set_grad_enabled(wanted)
        try:
            with self._entered(self.autocast):
                return self.context.run(function, *args, **kwargs)
        finally:  # a module may have switched it too
            if torch.is_grad_enabled() is not outside:
                torch.set_grad_enabled(outside)

    def backward(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` in the caller's state, but outside autocast.

        Args:
            function: called on this thread; returns its result.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        # Why without autocast? torch advises against backward under it: backward operators run in the types that
        # autocast chose in forward. A step has both inside the caller's `with torch.autocast(...)`.
        with self._entered():
            return self.context.run(function, *args, **kwargs)

    def _entered(self, autocast: Collection[tuple[str, torch.dtype]] = ()) -> AbstractContextManager[None]:
        """The caller's state, but for the grad mode and the context variables."""
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        if not autocast and self.cuda_device is None and self.device is None and self.carried is None:
            return nullcontext()  # the common case
        return self._settings(autocast)

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
    """The device types for which autocast is enabled in the calling thread."""
    accelerator = torch.accelerator.current_accelerator()
    candidates = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return tuple(kind for kind in candidates if torch.is_autocast_enabled(kind))


def _cuda_device() -> int | None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None  # asking for the current device would initialise CUDA
    return torch.cuda.current_device()
