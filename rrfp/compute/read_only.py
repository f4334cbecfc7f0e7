"""Tensors between virtual stages: read-only by contract, and the check of that contract.

A stage must not write into a received tensor: its memory may still be read by others, and the sender may hold the same
tensor. Nor may it write into a tensor that it returned, which may still be sent or read. Every write through torch
increases the version of a tensor, and versions are compared here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from rrfp.compute.async_tensors import PLAIN
from rrfp.compute.payload import Payload, Structure, canonical
from rrfp.errors import StageError
from rrfp.model.tasks import B, F, Mode, Task

#: How torch's own error about a write into a leaf that requires grad ends.
_LEAF_ERROR = "leaf Variable that requires grad is being used in an in-place operation"

_REMEDY = "what comes from another stage is read-only; use an out-of-place operation, or clone it first (x = x.clone())"


class ReadOnly:
    """Detects writes into the tensors of ``payloads``."""

    __slots__ = ("_origins", "_payloads", "_versions", "_what")

    def __init__(self, payloads: Sequence[Payload], what: str, origins: Sequence[int]) -> None:
        self._payloads = payloads
        self._what = what
        self._origins = origins
        self._versions = [
            (tensor, tensor._version)
            for payload in payloads
            for tensor in payload.tensors
            if tensor is not None and not tensor.is_inference()  # inference tensors count no versions
        ]

    def written(self) -> str | None:
        """A description of the first tensor written to; or None."""
        for tensor, version in self._versions:
            if tensor._version != version:
                return self._describe(tensor)
        return None

    def _describe(self, written: Tensor) -> str:
        return next(
            f"{_path(payload.structure, index)} {self._what} from virtual stage {origin}"
            for payload, origin in zip(self._payloads, self._origins, strict=True)
            for index, tensor in enumerate(payload.tensors)
            if tensor is written
        )

    def check(self, module: nn.Module, virtual_stage: int, when: str) -> None:
        """Raise a StageError that names the module if a tensor was written to."""
        if (tensor := self.written()) is None:
            return
        inplace = [
            f"{name!r} ({type(m).__name__})" for name, m in module.named_modules() if getattr(m, "inplace", False)
        ]
        hint = f"; submodules with inplace=True: {', '.join(inplace)}" if inplace else ""
        raise StageError(
            f"{type(module).__name__} on virtual stage {virtual_stage} wrote into {tensor} {when}{hint}; {_REMEDY}"
        )


#: A payload that was returned: its nesting, and what counts the writes into each of its tensors.
_Watched = tuple[Structure, list[Tensor | None]]


class Returned:
    """The outputs of a rank's tasks, in which others must not write."""

    # A message is copied on the loop, while the lane may already run the next task. torch counts a write after it has
    # made it, so a look at the version after the copy would miss a write under way. Hence the lane looks, at the end of
    # each task: a write comes either after the copy, or is counted before the task that made it ends. That task fails,
    # so no rank finishes the step with what left in between.

    def __init__(self) -> None:
        self._mode = Mode.TRAIN
        self._by_task: dict[Task, list[_Watched]] = {}
        #: All counters, and what they counted when their tensors were returned, by identity: a look takes 50 ns each.
        self._counters: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}
        #: Outputs that no one reads any more. The loop appends to it, all else is done on the lane's thread.
        self._dropped: deque[Task] = deque()

    def open(self, mode: Mode) -> None:
        """Begin a step, between tasks."""
        self._mode = mode
        self._dropped.clear()
        for known in (self._by_task, self._counters, self._versions):
            known.clear()

    def begin(self, task: Task) -> None:
        if task.kind is B:
            self._forget(Task(F, task.microbatch, task.virtual_stage))

    def end(self, task: Task, payloads: Sequence[Payload], name_of: Callable[[int], str]) -> None:
        """A task returns ``payloads``; a StageError if it wrote into earlier ones."""
        if list(map(_VERSION, self._counters.values())) != list(self._versions.values()):
            raise StageError(self._refusal(task, name_of))
        while self._dropped:  # only now: the task may have begun before the output was copied for the last time
            self._forget(self._dropped.popleft())
        if payloads:
            self._by_task[task] = [(payload.structure, self._watch(payload.tensors)) for payload in payloads]

    def _watch(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The counters of ``tensors``, which are looked at from now on."""
        counters = [None if tensor is None else write_counter(tensor) for tensor in tensors]
        for counter in counters:
            if counter is not None:
                self._counters[key := id(counter)] = counter
                self._versions[key] = counter._version
        return counters

    def drop(self, task: Task) -> None:
        """The output of ``task`` has been read. Called on the loop."""
        # Of a training step the outputs of forwards are kept until `begin`: readers on this rank save them for their
        # backwards, and a module that writes into them is found whatever the timing.
        if task.kind is B or self._mode is not Mode.TRAIN:
            self._dropped.append(task)

    def _forget(self, task: Task) -> None:
        for _, counters in self._by_task.pop(task, ()):
            for counter in counters:
                if counter is not None:
                    del self._counters[key := id(counter)], self._versions[key]

    def _refusal(self, task: Task, name_of: Callable[[int], str]) -> str:
        returned, structure, index = next(
            (returned, structure, index)
            for returned, watched in self._by_task.items()
            for structure, counters in watched
            for index, counter in enumerate(counters)
            if counter is not None and counter._version != self._versions[id(counter)]
        )
        writer, owner = (f"{name_of(v)} on virtual stage {v}" for v in (task.virtual_stage, returned.virtual_stage))
        tensor = _path(structure, index)
        if returned.kind is B:
            tensor = f"{tensor} of the input gradients"
        if writer == owner:
            owner, remedy = "it", "return a clone (x.clone())"
        else:
            remedy = "return a clone there, or write into a clone (x = x.clone())"
        return (
            f"{writer} wrote in {task} into {tensor} that {owner} had returned in {returned}, and that may still be "
            f"sent or read: {remedy}"
        )


class Received:
    """The forward inputs of one task: leaves with gradients of their own."""

    __slots__ = ("_watch", "payloads")

    def __init__(self, payloads: Sequence[Payload], predecessors: Sequence[int], *, training: bool) -> None:
        # Lists, not generators, here and below: this runs for every task, and for few tensors.
        self.payloads = tuple(
            [Payload(tuple([_leaf(t, training) for t in payload.tensors]), payload.structure) for payload in payloads]
        )
        self._watch = ReadOnly(self.payloads, "received", predecessors)

    def values(self, *, hidden: bool = False) -> list[Any]:
        """The value of each predecessor, of leaves, or of views if ``hidden``."""
        # Why views? A split backward calls torch.autograd.grad for the leaves, and a hook for several tensors, as
        # torch.utils.flop_counter registers on the inputs of modules, fails there on a leaf.
        payloads = self.payloads
        if hidden:
            payloads = tuple(Payload(tuple(map(_view, payload.tensors)), payload.structure) for payload in payloads)
        return [payload.unpack() for payload in payloads]

    def tensors(self) -> list[Tensor]:
        return [tensor for payload in self.payloads for tensor in payload.tensors if tensor is not None]

    def check(self, module: nn.Module, virtual_stage: int, when: str) -> None:
        self._watch.check(module, virtual_stage, when)

    def gradients(self) -> tuple[Payload, ...]:
        return tuple([Payload(tuple(map(_gradient, payload.tensors))) for payload in self.payloads])

    def explain(self, error: RuntimeError, module: nn.Module, virtual_stage: int) -> StageError | None:
        """The StageError for torch's error about a write into a leaf; None for any other error."""
        # A received tensor that requires grad is a leaf. In one process it is an intermediate result, into which the
        # same module may write; hence the explanation.
        if _LEAF_ERROR not in str(error) or not any(tensor.requires_grad for tensor in self.tensors()):
            return None
        where = _innermost_submodule(error.__traceback__, module)
        return StageError(
            f"{type(module).__name__} on virtual stage {virtual_stage} wrote in place into a received tensor{where}; "
            f"{_REMEDY}"
        )


_VERSION = attrgetter("_version")

#: Replaces the memory of counters.
_NO_MEMORY = torch.empty(0, device="cpu")


def write_counter(tensor: Tensor) -> Tensor | None:
    """A tensor without memory that has the version of ``tensor``; or None."""
    if type(tensor) not in PLAIN or tensor.is_inference():
        return None
    counter = tensor.detach()  # it shares the version, and keeps it with other data
    try:
        counter.data = _NO_MEMORY if tensor.is_cpu else tensor.new_empty(0)
    except RuntimeError:  # sparse, nested or quantized
        return None
    return counter


def _leaf(tensor: Tensor | None, training: bool) -> Tensor | None:
    if tensor is None:
        return None
    # A detached tensor shares the version of its source, so a write through either one is detected.
    return tensor.detach().requires_grad_(training and tensor.requires_grad)


def _view(leaf: Tensor | None) -> Tensor | None:
    if leaf is None or not leaf.requires_grad:
        return leaf
    view: Tensor = torch.ops.aten.alias(leaf)  # the only view whose gradient may be sparse
    return view


def _gradient(leaf: Tensor | None) -> Tensor | None:
    """The gradient of a leaf as it is sent, possibly sparse."""
    gradient = None if leaf is None else leaf.grad
    if gradient is None:
        return None
    return canonical(gradient if gradient.layout is torch.strided else gradient.to_dense())


def _path(structure: Structure, index: int) -> str:
    path = dict(_paths(structure, "")).get(index, "") if structure else f"[{index}]"
    return f"tensor {path}" if path else "the tensor"


def _paths(structure: Structure, prefix: str) -> Iterator[tuple[int, str]]:
    mark, rest = structure[0], structure[1:]
    if mark == "t":
        yield rest[0], prefix
    elif mark == "{":
        for key, item in zip(rest[0], rest[1:], strict=True):
            yield from _paths(item, f"{prefix}[{key!r}]")
    elif mark == "n":
        for field, item in zip(rest[1], rest[2:], strict=True):
            yield from _paths(item, f"{prefix}.{field}")
    elif mark != "v":
        for position, item in enumerate(rest):
            yield from _paths(item, f"{prefix}[{position}]")


def _innermost_submodule(traceback: TracebackType | None, module: nn.Module) -> str:
    names = {id(submodule): name for name, submodule in module.named_modules()}
    innermost: nn.Module | None = None
    while traceback is not None:
        candidate = traceback.tb_frame.f_locals.get("self")
        if id(candidate) in names:
            innermost = candidate
        traceback = traceback.tb_next
    if innermost is None or innermost is module:
        return ""
    return f", in its submodule {names[id(innermost)]!r} ({type(innermost).__name__})"
