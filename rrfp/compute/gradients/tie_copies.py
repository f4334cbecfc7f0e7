"""Ties: a parameter of which several virtual stages hold a copy, such as an embedding that is the head's weight too.

This module collects the copies of a process, and the description of each copy that ranks compare. A parameter *object*
that several virtual stages of a process share is tied without being named by the caller.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rrfp.compute.gradients.layout import as_dtensor, local_part
from rrfp.compute.gradients.module_reduction import needs_whole_backward
from rrfp.compute.gradients.shared import SharedGradients
from rrfp.compute.gradients.sparse import check_ties_not_sparse
from rrfp.errors import ConfigError
from rrfp.model.names import TextOf, numbered

#: By the name of the tie: this rank's copy, or its copies if several of its chunks have one.
Ties = Mapping[str, Tensor | Sequence[Tensor]]

#: Bytes that are copied to the CPU at once to compare values.
_SLICE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class TiedCopy:
    """A copy of a tied parameter."""

    #: The name of the tie.
    tie: str
    #: The virtual stage that holds the copy.
    virtual_stage: int
    #: The copy.
    parameter: nn.Parameter
    #: Whether the object's home is a lower virtual stage of this process (`SharedGradients`).
    is_guest: bool
    #: The module of the virtual stage.
    module: nn.Module
    #: The parameter's name in it.
    name: str

    def is_held(self) -> bool:
        """Whether the module still has this object. Asked in every step, so it looks at the name first."""
        current: nn.Parameter | None = None
        with suppress(AttributeError):
            current = self.module.get_parameter(self.name)
        if current is self.parameter or any(current is self.parameter for current in self.module.parameters()):
            return True
        # Between an evaluation and the next backward fully_shard keeps some parameters gathered, in other objects.
        is_sharded = as_dtensor(self.parameter) is not None and needs_whole_backward(self.module) is not None
        return is_sharded and current is not None and as_dtensor(current) is None

    def settings(self) -> CopySettings:
        """The description that ranks compare. Reads the values."""
        parameter = self.parameter
        sharded = as_dtensor(parameter)
        kind = f"{tuple(parameter.shape)} of {parameter.dtype}"
        if sharded is not None:
            kind += f", {' and '.join(map(str, sharded.placements))}"
        values = b"" if self.is_guest else _digest(parameter)  # a guest is the same object as its home
        return CopySettings(self.tie, self.virtual_stage, kind, parameter.requires_grad, self.is_guest, values)


@dataclass(frozen=True, slots=True)
class CopySettings:
    """The description of a copy that ranks compare in the handshake."""

    #: The name of the tie.
    tie: str
    #: The virtual stage that holds the copy.
    virtual_stage: int
    #: Shape, dtype and placement, as text for messages.
    kind: str
    #: Whether the copy requires grad.
    requires_grad: bool
    #: See `TiedCopy`.
    is_guest: bool
    #: a digest of the values; empty for a guest, which is the same object as its home.
    values: bytes


@dataclass(frozen=True, slots=True)
class Tie:
    """A tie that all ranks agree on."""

    #: The name of the tie.
    name: str
    #: The virtual stages with a copy, ascending: the order in which gradients are added.
    virtual_stages: tuple[int, ...]
    #: Whether some copies are one object. Such a tie is summed even in a step that reduces nothing, because the object
    #: has one ``.grad``.
    is_shared: bool = False


def find_copies(
    ties: Ties | Sequence[Ties] | None,
    modules: Sequence[Mapping[int, nn.Module]],
    shared: SharedGradients,
    text_of: TextOf = numbered,
) -> list[TiedCopy]:
    """All copies on the ranks of this process, sorted by tie and virtual stage.

    Args:
        ties: by name the parameters of all ranks of this process, or such a mapping for each rank.
        modules: of each rank by virtual stage.
        shared: the parameters that virtual stages of the process share; they are tied even if ``ties`` lacks them.
        text_of: names virtual stages in errors.
    """
    merged = _merged(modules)
    copies = list(_named_copies(_by_name(ties, modules), merged, shared, text_of))
    named = {id(copy.parameter) for copy in copies}
    for parameter, stages in shared.holders:
        if id(parameter) not in named:
            tie = f"{_name_of(parameter, merged[stages[0]])}@{stages[0]}"
            copies += [_copy(tie, v, parameter, v != stages[0], merged[v]) for v in stages]
    tied: dict[str, list[Tensor]] = {}
    for copy in copies:
        tied.setdefault(copy.tie, []).append(copy.parameter)
    check_ties_not_sparse(merged, tied, text_of)
    return sorted(copies, key=lambda copy: (copy.tie, copy.virtual_stage))


def _by_name(
    ties: Ties | Sequence[Ties] | None, modules: Sequence[Mapping[int, nn.Module]]
) -> dict[str, list[nn.Parameter]]:
    """The parameters of each tie, without repeats."""
    if ties is None or isinstance(ties, Mapping):
        pairs: list[tuple[Ties, Mapping[int, nn.Module]]] = [(ties or {}, _merged(modules))]
    elif isinstance(ties, list | tuple) and len(ties) == len(modules):
        pairs = list(zip(ties, modules, strict=True))
    else:
        raise ConfigError(
            f"ties is of type {type(ties).__name__}, must be a dict, or a list of {len(modules)}, one a stage"
        )
    by_name: dict[str, dict[int, nn.Parameter]] = {}
    for rank_ties, rank_modules in pairs:
        for name, parameter in _checked(rank_ties, rank_modules):
            by_name.setdefault(name, {})[id(parameter)] = parameter
    return {name: list(parameters.values()) for name, parameters in by_name.items()}


def _merged(modules: Sequence[Mapping[int, nn.Module]]) -> dict[int, nn.Module]:
    """All modules of the process by virtual stage."""
    return {v: module for rank_modules in modules for v, module in rank_modules.items()}


def _checked(ties: Any, modules: Mapping[int, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The (name, parameter) pairs of one rank's ``ties``."""
    if not isinstance(ties, Mapping):
        raise ConfigError(f"ties is of type {type(ties).__name__}, must be a dict of parameters by name")
    known = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    for name, value in ties.items():
        if not isinstance(name, str):
            raise ConfigError(f"ties has the key {name!r}, must be a name")
        for parameter in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(parameter, nn.Parameter) or id(parameter) not in known:
                what = f"{parameter!r:.100} (of type {type(parameter).__name__})"
                if isinstance(parameter, Tensor):
                    what = f"a tensor of shape {tuple(parameter.shape)} that no module of this rank has"
                raise ConfigError(f"ties[{name!r}] is {what}, must be a parameter of a module of this rank")
            yield name, parameter


def _named_copies(
    by_name: Mapping[str, Sequence[nn.Parameter]],
    modules: Mapping[int, nn.Module],
    shared: SharedGradients,
    text_of: TextOf,
) -> Iterator[TiedCopy]:
    tie_of: dict[int, str] = {}
    for name, parameters in by_name.items():
        by_stage: dict[int, nn.Parameter] = {}
        for parameter in parameters:
            if (other := tie_of.setdefault(id(parameter), name)) != name:
                raise ConfigError(f"ties[{name!r}] is the parameter of ties[{other!r}] too, must be in one tie")
            for v in _holders(parameter, modules):
                if v in by_stage:
                    raise ConfigError(f"ties[{name!r}] has two parameters of {text_of(v)}, must have one")
                by_stage[v] = parameter
        for v, parameter in sorted(by_stage.items()):
            yield _copy(name, v, parameter, not shared.is_home(parameter, v), modules[v])


def _holders(parameter: nn.Parameter, modules: Mapping[int, nn.Module]) -> list[int]:
    return sorted(v for v, module in modules.items() if any(parameter is other for other in module.parameters()))


def _copy(tie: str, virtual_stage: int, parameter: nn.Parameter, is_guest: bool, module: nn.Module) -> TiedCopy:
    return TiedCopy(tie, virtual_stage, parameter, is_guest, module, _name_of(parameter, module))


def _name_of(parameter: nn.Parameter, module: nn.Module) -> str:
    return next(name for name, other in module.named_parameters() if other is parameter)


def _digest(parameter: nn.Parameter) -> bytes:
    """A digest of this rank's values, bit by bit."""
    digest = hashlib.blake2b(digest_size=16)
    flat = local_part(parameter).reshape(-1)
    for piece in torch.split(flat, max(1, _SLICE_BYTES // flat.element_size())):
        array: Any = piece.cpu().contiguous().view(torch.uint8).numpy()
        digest.update(array)
    return digest.digest()
