"""Watches state that tasks write, such as running statistics, which would make results depend on the order of tasks.

By default a warning names a buffer that a forward out of microbatch order writes. With ``deterministic=True`` forwards
of modules that are known to write buffers run in microbatch order (`rrfp.pipeline.partition`). Any other detected write
is refused: of a buffer in a forward without an order, of a buffer in backward, which has no fixed order among the
forwards, and of a parameter anywhere. docs/determinism.md lists the writes that cannot be detected.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from rrfp.compute.activations import storage_pointer
from rrfp.compute.async_tensors import inner_tensors
from rrfp.compute.gradients.layout import checksum
from rrfp.compute.loss import class_name
from rrfp.core.ready_set import ForcedOrder
from rrfp.errors import StageError
from rrfp.log import get_logger
from rrfp.model.tasks import Kind, Mode, StepId, Task

logger = get_logger(__name__)

#: A submodule and the name of its parameter or buffer.
_Key = tuple[nn.Module, str]


def writes_buffers_in_forward(module: nn.Module) -> bool:
    """Whether a submodule writes buffers in forward, as batch norms do."""
    return any(isinstance(part, _NormBase) and part.track_running_stats for part in module.modules())


class BufferMemory:
    """The buffers of a module, whose memory a later forward may write."""

    def __init__(self, unit: nn.Module) -> None:
        self.unit = unit
        #: The submodules that have buffers.
        self._parts: list[nn.Module] = []
        self._buffers: list[Tensor] = []
        self._addresses: frozenset[int | None] = frozenset()

    def open(self) -> None:
        """Begin a step: the module may have changed since the last."""
        self._parts = [part for part in self.unit.modules() if part._buffers]
        self._buffers, self._addresses = [], frozenset()

    def needs_copy(self, tensor: Tensor) -> bool:
        """See `Payload.sent`: whether ``tensor`` shares memory with a buffer, or is an inference tensor."""
        if tensor.is_inference():
            return True
        if not self._parts:
            return False
        # Why compare objects? A forward may have replaced a buffer, and asking all for their memory takes longer.
        buffers = [buffer for part in self._parts for buffer in part._buffers.values() if buffer is not None]
        if len(buffers) != len(self._buffers) or not all(map(is_, buffers, self._buffers)):
            self._buffers = buffers
            inner = (part for buffer in buffers for part in inner_tensors(buffer))
            self._addresses = frozenset(map(storage_pointer, inner)) - {None}
        return storage_pointer(tensor) in self._addresses

    def versions(self) -> list[tuple[_Key, Tensor, int]]:
        """Every buffer that can carry something from task to task, with torch's count of its writes."""
        return [
            ((part, name), tensor, _version(tensor))
            for part in self._parts
            for name, tensor in part._buffers.items()
            if tensor is not None and name not in _made_anew(part)
        ]


class CarriedState:
    """Warns, once, of a buffer that a forward out of microbatch order writes."""

    def __init__(self) -> None:
        self._has_warned = False

    @contextmanager
    def watching(self, task: Task, buffers: BufferMemory) -> Iterator[None]:
        """Watch the forward ``task``, which runs within, after the forward of a later microbatch."""
        before = [] if self._has_warned else buffers.versions()
        yield
        for (part, name), tensor, version in before:
            now = part._buffers.get(name)
            is_written = _version(tensor) != version or (now is not tensor and (now is None or not _equal(now, tensor)))
            if is_written and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s on virtual stage %d wrote its buffer %s (of %s) in %s, after that of a later microbatch: state "
                    "that a module carries from one microbatch to the next is not that of one process where "
                    "forwards run out of order, as with sizes=. Let no result depend on the order, pass no sizes, or "
                    "deterministic=True, which runs batch norms in order and refuses other written buffers",
                    class_name(buffers.unit),
                    task.virtual_stage,
                    _name_in(buffers.unit, (part, name)),
                    type(part).__name__,
                    task,
                )


class _Seen(NamedTuple):
    """A parameter or buffer after the last task."""

    tensor: Tensor
    #: Torch's count of its writes.
    version: int

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)


class StateWatch:
    """Detects forbidden writes by the tasks of one virtual stage; ``ordered`` forwards may write buffers."""

    # A step of one microbatch has only one order of tasks, so any write is allowed. A buffer that a task registers is
    # assumed constant, such as a mask that is made at its first use. A warning is logged unless all forwards so far ran
    # in microbatch order.

    # Why two ways to detect writes? torch's version counter costs little, so it is read after every task, but misses
    # writes through `.data` and some kernels. A checksum finds those and reads all buffers, so it is computed only
    # around the first F, B and W of training and of evaluation, and again after train() or eval() of any submodule.

    def __init__(self, unit: nn.Module, virtual_stage: int, *, ordered: bool) -> None:
        self._unit = unit
        self._name = f"{class_name(unit)} on virtual stage {virtual_stage}"
        self._ordered = ordered
        self._checked: set[tuple[Kind, Mode, bytes]] = set()

    def open(self, step: StepId) -> None:
        """Begin a step. Writes before it are the caller's, and allowed."""
        self._is_open = step.microbatches > 1
        # FSDP replaces parameters by their shards inside tasks, which is no write.
        is_fsdp = any(hasattr(part, "set_requires_gradient_sync") for part in self._unit.modules())
        self._with_parameters = not is_fsdp
        self._made_anew = [(part, name) for part in self._unit.modules() for name in _made_anew(part)]
        self._seen = self._look()
        self._case = (step.mode, bytes(part.training for part in self._unit.modules()))
        #: The number of forwards so far, if all ran in microbatch order; else None.
        self._in_order: int | None = 0

    @contextmanager
    def watching(self, task: Task) -> Iterator[None]:
        if not self._is_open:
            yield
            return
        case = (task.kind, *self._case)
        watched = [] if case in self._checked else [key for key in self._seen if self._is_fingerprinted(key, task)]
        before = [_fingerprint(self._seen[key].tensor) for key in watched]
        yield
        after = [_fingerprint(self._seen[key].tensor) for key in watched]
        self._checked.add(case)
        uncounted = {key for key, old, new in zip(watched, before, after, strict=True) if old != new}
        self._compare(task, uncounted)

    def _is_fingerprinted(self, key: _Key, task: Task) -> bool:
        return not self._seen[key].is_parameter and not self._may_write(self._seen[key], task)

    def _may_write(self, seen: _Seen, task: Task) -> bool:
        return task.kind is Kind.F and self._ordered and not seen.is_parameter

    def _look(self) -> dict[_Key, _Seen]:
        """All parameters and buffers now that can carry something from task to task."""
        # Why not named_parameters and named_buffers? This runs after every task, and torch's iterators take several
        # times as long as reading the dicts.
        seen: dict[_Key, _Seen] = {}
        visited: set[nn.Module] = set()
        waiting: list[nn.Module | None] = [self._unit]
        while waiting:
            part = waiting.pop()
            if part is None or part in visited:
                continue
            visited.add(part)
            waiting.extend(part._modules.values())
            for tensors in (part._buffers, part._parameters) if self._with_parameters else (part._buffers,):
                for name, tensor in list(tensors.items()):  # a module may be shared with another lane
                    if tensor is not None:
                        seen[part, name] = _Seen(tensor, _version(tensor))
        for key in self._made_anew:
            seen.pop(key, None)
        return seen

    def _compare(self, task: Task, uncounted: set[_Key]) -> None:
        now = self._look()
        for key, old in self._seen.items():
            new = now.get(key)
            if new is None:
                verb = "drops"
            elif new.tensor is not old.tensor:
                verb = "replaces" if _version(old.tensor) != old.version or not _equal(new.tensor, old.tensor) else ""
            else:
                verb = "writes" if new.version != old.version or key in uncounted else ""
            if verb and not self._may_write(old, task):
                raise StageError(self._refusal(verb, key, old, task))
        self._note_order(task)
        if created := now.keys() - self._seen.keys():
            self._warn_of(created, task)
        self._seen = now

    def _refusal(self, verb: str, key: _Key, old: _Seen, task: Task) -> str:
        what, where = "parameter" if old.is_parameter else "buffer", "forward" if task.kind is Kind.F else "backward"
        if old.is_parameter:
            remedy = "write parameters between steps"
        elif task.kind is not Kind.F:
            remedy = (
                "activation checkpointing runs a forward again in backward: keep this submodule out of it, or its "
                "buffers as they are (eval mode)"
            )
        elif verb == "writes":
            remedy = "keep its buffers as they are (eval mode), or write them between steps"
        else:
            remedy = "a constant must be made before the first step, as large as it will be needed"
        return (
            f"{self._name} {verb} its {what} {_name_in(self._unit, key)} (of {type(key[0]).__name__}) in {where}, so "
            f"its result depends on the order of microbatches: deterministic=True cannot run it; {remedy}"
        )

    def _note_order(self, task: Task) -> None:
        if task.kind is Kind.F and self._in_order is not None:
            self._in_order = self._in_order + 1 if task.microbatch == self._in_order else None

    def _warn_of(self, created: set[_Key], task: Task) -> None:
        if self._in_order is not None and task.kind is Kind.F:  # one process would have made the same buffer
            return
        for name in sorted(_name_in(self._unit, key) for key in created):
            logger.warning(
                "%s made its buffer %s in %s, out of microbatch order: deterministic=True takes it for a constant; if "
                "it depends on the microbatch, make it before the first step",
                self._name,
                name,
                task,
            )


class StateWatches:
    """The watches of a rank's virtual stages; none without forced order."""

    def __init__(self, units: Mapping[int, nn.Module], in_order: Collection[ForcedOrder]) -> None:
        watched = units if in_order else {}
        self._watches = {v: StateWatch(unit, v, ordered=(Kind.F, v) in in_order) for v, unit in watched.items()}

    def open(self, step: StepId) -> None:
        for watch in self._watches.values():
            watch.open(step)

    def watching(self, task: Task) -> AbstractContextManager[None]:
        watch = self._watches.get(task.virtual_stage)
        return nullcontext() if watch is None else watch.watching(task)


def _made_anew(part: nn.Module) -> list[str]:
    """The buffers that every forward makes anew, such as LongRoPE's frequencies."""
    kinds = vars(part).get("rope_type")
    named = {f"{layers}_": kind for layers, kind in kinds.items()} if isinstance(kinds, Mapping) else {"": kinds}
    return [f"{prefix}inv_freq" for prefix, kind in named.items() if kind == "longrope"]


def _name_in(unit: nn.Module, key: _Key) -> str:
    prefix = next((name for name, part in unit.named_modules() if part is key[0]), "")
    return repr(".".join(filter(None, (prefix, key[1]))))


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:
        return 0  # an inference tensor, which is read-only


def _fingerprint(tensor: Tensor) -> list[int]:
    return [checksum(part) for part in inner_tensors(tensor) if _is_readable(part)]


@torch.no_grad()
def _equal(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal in type, shape, dtype, device and values."""
    pairs = list(zip(inner_tensors(left), inner_tensors(right), strict=False))
    return type(left) is type(right) and all(
        (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        and _is_readable(a)
        and _is_readable(b)
        and torch.equal(a, b)
        for a, b in pairs
    )


def _is_readable(tensor: Tensor) -> bool:
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return False
    return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested)
