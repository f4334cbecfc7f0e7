"""Tensors from other virtual stages: read-only by contract, and the check of that contract.

A stage must not write into a received tensor: its memory may still be read by others, and the sender may hold the same
tensor. Every write through torch increases the version of a tensor, and versions are compared here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from rrfp.compute.payload import Payload, Structure, canonical
from rrfp.errors import StageError

#: How torch's own error about a write into a leaf that requires grad ends.
_LEAF_ERROR = "leaf Variable that requires grad is being used in an in-place operation"

_REMEDY = "what comes from another stage is read-only; use an out-of-place operation, or clone it first (x = x.clone())"


class ReadOnly:
    """Detects writes into the tensors of ``payloads``, ``what`` of each virtual stage of ``origins`` (for messages)."""

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
        """A description of the first tensor written to since construction; None if there is none."""
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
        """Raise a StageError if a tensor was written to; it names module, tensor, likely submodules and the remedy."""
        if (tensor := self.written()) is None:
            return
        inplace = [
            f"{name!r} ({type(m).__name__})" for name, m in module.named_modules() if getattr(m, "inplace", False)
        ]
        hint = f"; submodules with inplace=True: {', '.join(inplace)}" if inplace else ""
        raise StageError(
            f"{type(module).__name__} on virtual stage {virtual_stage} wrote into {tensor} {when}{hint}; {_REMEDY}"
        )


class Received:
    """The forward inputs of one task: new leaves on the received memory, each with a gradient of its own.

    Args:
        payloads: one for each predecessor.
        predecessors: their virtual stages.
        training: whether a leaf requires grad if the sent tensor did.
    """

    __slots__ = ("_watch", "payloads")

    def __init__(self, payloads: Sequence[Payload], predecessors: Sequence[int], *, training: bool) -> None:
        # Lists, not generators, here and below: this runs for every task, and for few tensors.
        self.payloads = tuple(
            [Payload(tuple([_leaf(t, training) for t in payload.tensors]), payload.structure) for payload in payloads]
        )
        self._watch = ReadOnly(self.payloads, "received", predecessors)

    def values(self, *, hidden: bool = False) -> list[Any]:
        """The value of each predecessor, made of the leaves; if ``hidden``, of views of them."""
        # Why views? A split backward calls torch.autograd.grad for the leaves, and a hook for several tensors, as
        # torch.utils.flop_counter registers on the inputs of modules, fails there on a leaf.
        payloads = self.payloads
        if hidden:
            payloads = tuple(Payload(tuple(map(_view, payload.tensors)), payload.structure) for payload in payloads)
        return [payload.unpack() for payload in payloads]

    def tensors(self) -> list[Tensor]:
        """All leaves."""
        return [tensor for payload in self.payloads for tensor in payload.tensors if tensor is not None]

    def check(self, module: nn.Module, virtual_stage: int, when: str) -> None:
        """See :meth:`ReadOnly.check`."""
        self._watch.check(module, virtual_stage, when)

    def gradients(self) -> tuple[Payload, ...]:
        """The gradients of the leaves, one payload for each predecessor; None for a leaf without one."""
        return tuple([Payload(tuple(map(_gradient, payload.tensors))) for payload in self.payloads])

    def explain(self, error: RuntimeError, module: nn.Module, virtual_stage: int) -> StageError | None:
        """The StageError for torch's error about a write into a leaf; None for any other error.

        A received tensor that requires grad is a leaf. In one process it is an intermediate result, into which the same
        module may write; hence the explanation.
        """
        if _LEAF_ERROR not in str(error) or not any(tensor.requires_grad for tensor in self.tensors()):
            return None
        where = _innermost_submodule(error.__traceback__, module)
        return StageError(
            f"{type(module).__name__} on virtual stage {virtual_stage} wrote in place into a received tensor{where}; "
            f"{_REMEDY}"
        )


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
    """The gradient of a leaf as it is sent; the one of a received embedding table may be sparse."""
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
    """A description of the innermost submodule in the frames of ``traceback``; empty if there is none."""
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
