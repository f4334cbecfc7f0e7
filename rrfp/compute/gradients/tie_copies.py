"""Ties: a parameter of which several virtual stages hold a copy, such as an embedding that is the head's weight too.

Here is who holds what, as each rank tells it. A parameter *object* that several virtual stages of a process share is
tied without a name given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rrfp.compute.gradients.layout import as_dtensor, local_part
from rrfp.compute.gradients.shared import SharedGradients
from rrfp.compute.gradients.sparse import check_ties_not_sparse
from rrfp.errors import ConfigError

#: By the tie's name: this rank's copy, or its copies where several of its chunks have one.
Ties = Mapping[str, Tensor | Sequence[Tensor]]

#: What is read at once to compare values, in bytes.
_SLICE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class TiedCopy:
    """A copy of a tied parameter.

    Attributes:
        tie: the tie's name.
        virtual_stage: who has it.
        parameter: the copy.
        is_guest: the object is at home on a lower virtual stage of this process (`SharedGradients`).
    """

    tie: str
    virtual_stage: int
    parameter: nn.Parameter
    is_guest: bool

    def terms(self) -> CopyTerms:
        """What the other ranks compare. Reads the values."""
        parameter = self.parameter
        sharded = as_dtensor(parameter)
        kind = f"{tuple(parameter.shape)} of {parameter.dtype}"
        if sharded is not None:
            kind += f", {' and '.join(map(str, sharded.placements))}"
        values = b"" if self.is_guest else _digest(parameter)  # a guest has those of its home
        return CopyTerms(self.tie, self.virtual_stage, kind, parameter.requires_grad, self.is_guest, values)


@dataclass(frozen=True, slots=True)
class CopyTerms:
    """What a rank tells about a copy.

    Attributes:
        tie: the tie's name.
        virtual_stage: who has it.
        kind: shape, dtype and placement, for people.
        learns: whether it requires grad.
        is_guest: see `TiedCopy`.
        values: a digest; empty where another copy of the same rank has the same memory.
    """

    tie: str
    virtual_stage: int
    kind: str
    learns: bool
    is_guest: bool
    values: bytes


@dataclass(frozen=True, slots=True)
class Tie:
    """What all ranks know of a tie.

    Attributes:
        name: the tie's.
        virtual_stages: those with a copy, ascending: the order in which gradients are added.
        is_shared: some copies are one object; then a step that reduces nothing sums it all the same, because there is
            one ``.grad`` for them.
    """

    name: str
    virtual_stages: tuple[int, ...]
    is_shared: bool = False


def find_copies(
    ties: Ties | Sequence[Ties] | None, modules: Sequence[Mapping[int, nn.Module]], shared: SharedGradients
) -> list[TiedCopy]:
    """All copies on the ranks of this process, by tie and virtual stage.

    Args:
        ties: by name the parameters of all ranks of this process, or such a mapping for each rank.
        modules: of each rank by virtual stage.
        shared: what virtual stages of the process share, which is tied unless ``ties`` says so.

    Raises:
        ConfigError: if ``ties`` is something else, or names a parameter that the modules do not have, or twice.
    """
    copies = list(_named_copies(_by_name(ties, modules), modules, shared))
    named = {id(copy.parameter) for copy in copies}
    for parameter, stages in shared.holders:
        if id(parameter) not in named:
            name = f"{_qualified(parameter, modules, stages[0])}@{stages[0]}"
            copies += [TiedCopy(name, v, parameter, v != stages[0]) for v in stages]
    tied: dict[str, list[Tensor]] = {}
    for copy in copies:
        tied.setdefault(copy.tie, []).append(copy.parameter)
    check_ties_not_sparse({v: module for own in modules for v, module in own.items()}, tied)
    return sorted(copies, key=lambda copy: (copy.tie, copy.virtual_stage))


def _by_name(
    ties: Ties | Sequence[Ties] | None, modules: Sequence[Mapping[int, nn.Module]]
) -> dict[str, list[nn.Parameter]]:
    """The parameters of each tie, each once."""
    if ties is None or isinstance(ties, Mapping):
        everywhere = {v: module for own in modules for v, module in own.items()}
        pairs: list[tuple[Ties, Mapping[int, nn.Module]]] = [(ties or {}, everywhere)]
    elif isinstance(ties, list | tuple) and len(ties) == len(modules):
        pairs = list(zip(ties, modules, strict=True))
    else:
        raise ConfigError(f"ties is {type(ties).__name__}, must be a dict, or a list of {len(modules)}, one a stage")
    found: dict[str, dict[int, nn.Parameter]] = {}
    for told, own in pairs:
        for name, parameter in _checked(told, own):
            found.setdefault(name, {})[id(parameter)] = parameter
    return {name: list(parameters.values()) for name, parameters in found.items()}


def _checked(ties: Any, modules: Mapping[int, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The pairs in what one rank passes."""
    if not isinstance(ties, Mapping):
        raise ConfigError(f"ties is {type(ties).__name__}, must be a dict of parameters by name")
    own = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    for name, told in ties.items():
        if not isinstance(name, str):
            raise ConfigError(f"ties has the key {name!r}, must be a name")
        for parameter in told if isinstance(told, list | tuple) else [told]:
            if not isinstance(parameter, nn.Parameter) or id(parameter) not in own:
                what = f"of shape {tuple(parameter.shape)}" if isinstance(parameter, Tensor) else repr(parameter)
                raise ConfigError(
                    f"ties[{name!r}] is a {type(parameter).__name__} {what} that no module of this rank has: must be "
                    "one of their parameters"
                )
            yield name, parameter


def _named_copies(
    by_name: Mapping[str, Sequence[nn.Parameter]], modules: Sequence[Mapping[int, nn.Module]], shared: SharedGradients
) -> Iterator[TiedCopy]:
    taken: dict[int, str] = {}
    for name, parameters in by_name.items():
        places: dict[int, nn.Parameter] = {}
        for parameter in parameters:
            if (other := taken.setdefault(id(parameter), name)) != name:
                raise ConfigError(f"ties[{name!r}] is the parameter of ties[{other!r}] too, must be in one tie")
            for v in _holders(parameter, modules):
                if v in places:
                    raise ConfigError(f"ties[{name!r}] has two parameters of virtual stage {v}, must have one")
                places[v] = parameter
        for v, parameter in sorted(places.items()):
            yield TiedCopy(name, v, parameter, not shared.is_home(parameter, v))


def _holders(parameter: nn.Parameter, modules: Sequence[Mapping[int, nn.Module]]) -> list[int]:
    pairs = (pair for own in modules for pair in own.items())
    return sorted(v for v, module in pairs if any(parameter is other for other in module.parameters()))


def _qualified(parameter: nn.Parameter, modules: Sequence[Mapping[int, nn.Module]], virtual_stage: int) -> str:
    (module,) = (own[virtual_stage] for own in modules if virtual_stage in own)
    return next(name for name, other in module.named_parameters() if other is parameter)


def _digest(parameter: nn.Parameter) -> bytes:
    """Of this rank's values, which fixes them bit by bit."""
    digest = hashlib.blake2b(digest_size=16)
    flat = local_part(parameter).reshape(-1)
    for piece in torch.split(flat, max(1, _SLICE_BYTES // flat.element_size())):
        array: Any = piece.cpu().contiguous().view(torch.uint8).numpy()
        digest.update(array)
    return digest.digest()
