"""Random numbers that depend on the task and never on its time.

Every task draws from generators seeded by (seed, training step, kind, virtual stage, microbatch), so dropout masks are
the same in any order of tasks, on any placement of the stages, after a resume with ``first_step``, with or without
evaluations between training steps, and in the one-process reference.

Why not give each task a generator? Dropout and similar operators take none: they draw from torch's CPU generator and
that of each CUDA device, which are global to the process. So a fork swaps the state of the *global* generators, and
holds a lock of the process until the caller's state is restored. Lanes in one process exclude one another; lanes in
processes of their own do not. A caller who draws random numbers in another thread while a step runs disturbs both
streams.

Why fork also around tasks that draw nothing? Whether a task draws is known only once it has drawn: a module may begin
at any microbatch, after ``train()``, in a branch on its data, or where a checkpoint recomputes; and a task cannot run
twice. So a fork is made cheap instead.
"""

from __future__ import annotations

import ctypes
import hashlib
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import _base as futures
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn

from rrfp import timeouts
from rrfp.compute.lanes.thread import lane_is_closed
from rrfp.errors import StageError
from rrfp.log import get_logger
from rrfp.model.tasks import Task

logger = get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

#: Where a thread stands that waits in Python for another one, and where such waits begin.
_WAITS, _WAITERS = threading.__file__, (threading.__file__, queue.__file__, futures.__file__)


class _Holder(NamedTuple):
    """Whose the process's generators are."""

    task: Task
    #: The identity of its thread.
    thread: int


class _Turns:
    """The process's generators belong to one task at a time; the others wait for their turns.

    One that would never end fails: where a loss has a thread of its own evaluate a teacher, and waits for it, the
    teacher's task waits for the loss. The sign of it is a wait for another thread in which the running task stands for
    `timeouts.OTHER_THREAD_S`, while a task of a step that began *within* its turn waits. A task that computes, sleeps,
    reads or waits in a collective gives no such sign, nor do steps of pipelines that ran side by side before.
    """

    def __init__(self) -> None:
        self.begun = 0
        self._lock = threading.Lock()
        self._holder: _Holder | None = None

    def take(self, task: Task, opened: int) -> None:
        """Wait for a turn of ``task``, whose step began when ``opened`` turns had begun. A StageError if none comes."""
        if not self._lock.acquire(blocking=False):
            self._wait(task, opened)
        self.begun += 1
        self._holder = _Holder(task, threading.get_ident())

    def end(self) -> None:
        self._holder = None
        self._lock.release()

    def _wait(self, task: Task, opened: int) -> None:
        seen: FrameType | None = None
        waited_s, look_s = 0.0, timeouts.OTHER_THREAD_S / 30
        while not self._lock.acquire(timeout=look_s):
            holder, turn = self._holder, self.begun
            if holder is not None and holder.thread == threading.get_ident():
                raise StageError(_nested(task, holder, ""))
            frame = None if holder is None or turn > opened else sys._current_frames().get(holder.thread)
            waited_s = waited_s + look_s if frame is not None and frame is seen else 0.0
            seen = frame if frame is not None and frame.f_code.co_filename == _WAITS else None
            if holder is not None and seen is not None and waited_s >= timeouts.OTHER_THREAD_S:
                raise StageError(_nested(task, holder, f", which has waited for another thread {_place(seen)}"))


def _nested(task: Task, holder: _Holder, state: str) -> str:
    return (
        f"task {task} cannot have torch's random generators: they belong to task {holder.task} of another pipeline of "
        f"this process{state}. Modules, loss_fn and hooks cannot call a pipeline of their process, on no thread: call "
        "it before the step, and pass its result as a target or an input"
    )


def _place(frame: FrameType | None) -> str:
    """The file and line of the innermost frame that is no part of Python's own waiting."""
    while frame is not None and frame.f_code.co_filename in _WAITERS:
        frame = frame.f_back
    where = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
    return f"for {timeouts.OTHER_THREAD_S:g} s{where}"


_generators = _Turns()


def replica_seed(seed: int, replica: int) -> int:
    """The seed of a replica: replicas have other microbatches, and need other dropout masks."""
    if replica == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{replica}".encode(), digest_size=8).digest(), "big") >> 1


def fork_seed(seed: int, step: int, task: Task) -> int:
    """The 64-bit seed of a task's generators: a fixed hash, the same in every process, version and platform."""
    text = f"{seed}:{step}:{task.kind}:{task.virtual_stage}:{task.microbatch}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def devices_of(module: nn.Module) -> frozenset[torch.device]:
    """The CUDA devices that hold parameters or buffers of ``module``."""
    tensors = (*module.parameters(), *module.buffers())
    return frozenset(tensor.device for tensor in tensors if tensor.device.type == "cuda")


#: A process begins with a random seed of 63 bits, and `torch.seed` draws another; who gives one gives fewer bits.
_BY_HAND = 1 << 48


class SeedNotice:
    """Warns, once a process, that tasks draw numbers which do not follow the seed that the caller has given torch."""

    _has_warned = False

    def __init__(self) -> None:
        self._steps = 0

    def open(self) -> Callable[[], None] | None:
        """A training step begins; returns what to call when a task has drawn. Only the first step is looked at."""
        self._steps += 1
        seed = torch.initial_seed()
        if self._steps > 1 or SeedNotice._has_warned or seed >= _BY_HAND:
            return None
        return partial(self._warn, seed)

    def _warn(self, seed: int) -> None:
        if not SeedNotice._has_warned:
            SeedNotice._has_warned = True
            logger.warning(
                "dropout and other random numbers of tasks follow seed=, which is 0 by default, and not torch's "
                "generator, which was seeded with %d: pass seed=None to follow it, or seed= to choose",
                seed,
            )


@dataclass(frozen=True, slots=True)
class RandomForks:
    """Forks of torch's global generators, one for each task; Python's and numpy's are left alone."""

    #: The run's seed; None disables forking and its lock.
    seed: int | None
    #: CUDA devices whose generators are forked along with the CPU's. One without an index is the current one of the
    #: thread that forks.
    devices: frozenset[torch.device] = frozenset()
    #: How many tasks of the process had begun when this was made, at the begin of a step.
    opened: int = field(default_factory=lambda: _generators.begun)
    #: Called after a task that has drawn from a generator.
    on_draw: Callable[[], None] | None = None
    #: By microbatch, the seed and the number that its random numbers depend on, where these are others.
    homes: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    def run(self, step: int, task: Task, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` with the global generators seeded for ``task`` of training step ``step``. Not reentrant."""
        # Why no context manager? One written as a generator takes as long as saving, seeding and restoring.
        if self.seed is None:
            return function(*args, **kwargs)
        seed = fork_seed(self.seed, step, task)
        if (home := self.homes.get(task.microbatch)) is not None:
            seed = fork_seed(home[0], step, task._replace(microbatch=home[1]))
        _generators.take(task, self.opened)
        try:
            generators = [torch.default_generator]
            if self.devices:
                generators += _cuda_generators(self.devices)
            states = [generator.get_state() for generator in generators]
            try:
                for generator in generators:
                    generator.manual_seed(seed)
                if self.on_draw is None:
                    return function(*args, **kwargs)
                seeded = _states(generators)
                result = function(*args, **kwargs)
                if _states(generators) != seeded:
                    self.on_draw()
                return result
            finally:
                for generator, state in zip(generators, states, strict=True):
                    # After a failure the caller goes on while the last task still runs: a seed that it has set stays.
                    if generator.initial_seed() == seed or not lane_is_closed():
                        generator.set_state(state)
        finally:
            _generators.end()


def _states(generators: Iterable[torch.Generator]) -> list[bytes]:
    """As bytes, without an operator, which would be work of the task on its stream."""
    states = [generator.get_state() for generator in generators]
    return [ctypes.string_at(state.data_ptr(), state.nbytes) for state in states]


def _cuda_generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    indices: list[int | None] = [device.index for device in devices]  # torch's stub has no None
    return [torch.cuda.default_generators[torch.cuda.current_device() if i is None else i] for i in indices]
