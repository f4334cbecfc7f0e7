"""Ties: a parameter of which several virtual stages hold a copy, such as an embedding that is the head's weight too.

A parameter *object* that several virtual stages of a process share is tied without being named by the caller. Ranks
compare a description of each copy. The gradients of a rank's copies are cut into pieces, and added in the order of
virtual stages; this module knows no messages.

After a step that sums a tie, every copy's ``.grad`` is the sum. Over several steps without ``zero_grad`` that total
must count once: the first copy keeps it, and before the next gradients are added the other copies replace it by zeros.
So any change that the caller makes in between (clipping, scaling, zeroing, dropping) lasts, if it is the same on all
copies. `rrfp.compute.gradients.reducer` does the same over replicas. The two combine: only the first copy on the first
replica keeps the total.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rrfp.compute.gradients.layout import ABSENT, as_dtensor, checksum, empty_totals, encode, local_part, zeros
from rrfp.compute.gradients.module_checks import check_ties_not_sparse, needs_whole_backward
from rrfp.compute.gradients.shared import SharedGradients
from rrfp.errors import ConfigError, StageError
from rrfp.model.graph import TextOf, numbered

#: By the name of the tie: this rank's copy, or its copies if several of its chunks have one.
Ties = Mapping[str, Tensor | Sequence[Tensor]]

#: Bytes that are copied to the CPU at once to compare values.
_SLICE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class TiedCopy:
    """A copy of a tied parameter."""

    tie: str
    virtual_stage: int
    parameter: nn.Parameter
    #: Whether the object's home is a lower virtual stage of this process (`SharedGradients`).
    is_guest: bool
    #: The module of the virtual stage.
    module: nn.Module
    #: The parameter's name in it.
    name: str

    def is_held(self) -> bool:
        """Whether the module still has this object."""
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

    tie: str
    virtual_stage: int
    #: Shape, dtype and placement, as text for messages.
    kind: str
    requires_grad: bool
    #: See `TiedCopy`.
    is_guest: bool
    #: a digest of the values; empty for a guest, which is the same object as its home.
    values: bytes


@dataclass(frozen=True, slots=True)
class Tie:
    """A tie that all ranks agree on."""

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
    """All copies on the ranks of this process, sorted; ``shared`` ones are tied even if ``ties`` lacks them."""
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
    return {v: module for rank_modules in modules for v, module in rank_modules.items()}


def _checked(ties: Any, modules: Mapping[int, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
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


#: The most bytes of a piece: large enough for speed, small enough that other messages do not wait long behind it.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Pieces:
    """The gradient of a copy, or the sum of a tie, as it is sent."""

    #: See `rrfp.compute.gradients.layout.encode`; ``ABSENT`` if there is no gradient.
    layout: int
    requires_grad: bool
    #: This rank's part of the gradient, cut into pieces: one-dimensional, on the CPU, read-only.
    tensors: tuple[Tensor, ...] = ()
    #: The checksum of the copy's values, in a step in which copies are compared.
    checksum: int | None = None


class TiedGradients:
    """The copies of one rank. Methods of a running step are called on the lane's thread."""

    def __init__(
        self,
        copies: Sequence[TiedCopy],
        shared: SharedGradients,
        repeated: list[nn.Parameter] | None = None,
        text_of: TextOf = numbered,
        check_every: int = 0,
    ) -> None:
        self._text_of = text_of
        #: In each so many steps that sum gradients the values of the copies are compared; 0: never.
        self._check_every = check_every
        #: Steps that summed, the current one included; and whether it compares the copies.
        self._sums = 0
        self._compares = False
        self.shared = shared
        self._piece_bytes = PIECE_BYTES
        #: The descriptions that ranks compare; filled by `read`.
        self.settings: tuple[CopySettings, ...] = ()
        #: The ties of the job; filled by `agree`.
        self.ties: tuple[Tie, ...] = ()
        #: Receives, once all ranks agree, the parameters whose gradients repeat those of a lower virtual stage.
        self._repeated = [] if repeated is None else repeated
        self._copies = {(copy.tie, copy.virtual_stage): copy for copy in copies}
        self._ties: dict[str, Tie] = {}
        #: Parameters whose gradient is a total that the first copy keeps.
        self._totals: dict[int, nn.Parameter] = {}

    # Called on the caller's thread.

    def read(self) -> None:
        self.check()
        self.settings = tuple(copy.settings() for copy in self._copies.values())

    def agree(self, ties: Iterable[Tie], most_bytes: int = PIECE_BYTES) -> None:
        """Keep all ties of the job; a message has ``most_bytes``."""
        self.ties = tuple(ties)
        self._piece_bytes = min(PIECE_BYTES, most_bytes)
        self._ties = {tie.name: tie for tie in self.ties}
        for copy in self._copies.values():
            if not copy.is_guest and copy.virtual_stage != self._ties[copy.tie].virtual_stages[0]:
                self._repeated.append(copy.parameter)

    def check(self) -> None:
        """Refuse a copy that its module has no more."""
        # Why not follow the name? The other ranks would have to compare the values again, and the gradients, totals and
        # optimizers of the copies belong to the old objects.
        for copy in self._copies.values():
            if not copy.is_held():
                raise ConfigError(
                    f"tie {copy.tie!r}: parameter {copy.name!r} of {self._text_of(copy.virtual_stage)} is not the "
                    "object that it was when the pipeline was made, so its gradients would not be summed: must stay "
                    "the same. load_state_dict(assign=True), to_empty() and assignments replace parameters: do that "
                    "before the pipeline and the optimizer are made, or copy values into the parameter"
                )

    def open(self, reduces: bool = True) -> None:
        """Prepare for a training step: totals that the first copies keep become zeros elsewhere."""
        empty_totals(self._totals)
        self._sums += reduces
        # Before the first step the handshake has compared them.
        self._compares = (
            reduces and self._sums > 1 and self._check_every > 0 and (self._sums - 1) % self._check_every == 0
        )

    # Called on the lane's thread.

    @torch.no_grad()
    def pieces(self, tie: str, virtual_stage: int) -> Pieces:
        """The gradient of a copy, in pieces that may share its memory."""
        copy = self._copies[tie, virtual_stage]
        if self._compares and copy.parameter.requires_grad and not copy.is_guest:
            return replace(self._gradient(tie, copy), checksum=checksum(copy.parameter))
        return self._gradient(tie, copy)

    def _gradient(self, tie: str, copy: TiedCopy) -> Pieces:
        virtual_stage = copy.virtual_stage
        with self.shared.swapped_in(virtual_stage):
            gradient, layout = (
                copy.parameter.grad,
                encode(copy.parameter, f"tie {tie!r} on {self._text_of(virtual_stage)}"),
            )
        if gradient is None or layout == ABSENT:
            return Pieces(ABSENT, copy.parameter.requires_grad)
        flat = local_part(gradient).contiguous().view(-1)
        cut = torch.split(flat, max(1, self._piece_bytes // flat.element_size()))
        return Pieces(layout, True, tuple(piece.to("cpu") for piece in cut))

    @torch.no_grad()
    def add(self, tie: str, others: Mapping[int, Pieces]) -> Pieces:
        """Sum a tie, with ``others`` by virtual stage, into this rank's copies; returns it for other ranks."""
        stages = self._ties[tie].virtual_stages
        local = [v for v in stages if v not in others]
        terms = {v: others[v] if v in others else self.pieces(tie, v) for v in stages}
        self._compare(tie, terms)
        layout = _common_layout(tie, terms, self._text_of)
        if layout == ABSENT:
            return Pieces(ABSENT, all(term.requires_grad for term in terms.values()))
        first, *rest = (term.tensors for term in terms.values() if term.layout != ABSENT)
        copy = self._copies[tie, stages[0]]
        with self.shared.swapped_in(stages[0]):
            parameter = copy.parameter
            if parameter.grad is None:
                parameter.grad = zeros(parameter, layout)
            part = local_part(parameter.grad)
        total = part.contiguous().view(-1)
        # Why write the first term? 0 + x is x but for the sign of a zero: -0.0 would become 0.0.
        if terms[stages[0]].layout == ABSENT:
            _write(total, first)
        for tensors in rest:
            _add(total, tensors)
        if total.data_ptr() != part.data_ptr():
            part.copy_(total.view(part.shape))
        pieces = self._gradient(tie, copy)
        self._put(tie, local[1:], pieces)
        return pieces

    def _compare(self, tie: str, terms: Mapping[int, Pieces]) -> None:
        """Refuse copies that have drifted apart, in a step that compares them."""
        values = {v: term.checksum for v, term in terms.items() if term.checksum is not None}
        first = next(iter(values), 0)
        if others := [v for v, value in values.items() if value != values[first]]:
            raise StageError(
                f"tie {tie!r} has other values on {', '.join(map(self._text_of, others))} than on "
                f"{self._text_of(first)}: must be the same, as the gradients are. Does an optimizer step some copies "
                "only, or with another learning rate, or were values loaded into one of them? "
                f"(check_replicas={self._check_every} compares them.)"
            )

    @torch.no_grad()
    def put(self, tie: str, pieces: Pieces) -> None:
        self._put(tie, [v for name, v in self._copies if name == tie], pieces)

    def _put(self, tie: str, virtual_stages: Iterable[int], pieces: Pieces) -> None:
        for v in virtual_stages:
            copy = self._copies[tie, v]
            with self.shared.swapped_in(v):
                self._put_one(copy, pieces)

    def _put_one(self, copy: TiedCopy, pieces: Pieces) -> None:
        parameter = copy.parameter
        if copy.is_guest:  # the home of the object has the sum already
            parameter.grad = None
        elif pieces.layout != ABSENT:
            if parameter.grad is None:
                parameter.grad = zeros(parameter, pieces.layout)
            part = local_part(parameter.grad)
            total = part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
            _write(total.view(-1), pieces.tensors)
            if total is not part:
                part.copy_(total)
            self._totals[id(parameter)] = parameter


class ProcessTies:
    """The ties of the ranks of one process; see `find_copies`, and `TiedGradients` for ``check_every``."""

    def __init__(
        self,
        ties: Ties | Sequence[Ties] | None,
        modules: Sequence[Mapping[int, nn.Module]],
        text_of: TextOf = numbered,
        check_every: int = 0,
    ) -> None:
        self.shared = SharedGradients({v: module for by_stage in modules for v, module in by_stage.items()})
        self.repeated: list[nn.Parameter] = []
        copies = find_copies(ties, modules, self.shared, text_of)
        self.ranks = [
            TiedGradients(
                [copy for copy in copies if copy.virtual_stage in by_stage],
                self.shared,
                self.repeated,
                text_of,
                check_every,
            )
            for by_stage in modules
        ]


def _common_layout(tie: str, terms: Mapping[int, Pieces], text_of: TextOf) -> int:
    """The layout of the gradients; a StageError if copies differ."""
    if len({term.requires_grad for term in terms.values()}) > 1:
        frozen = ", ".join(text_of(v) for v, term in terms.items() if not term.requires_grad)
        raise StageError(f"tie {tie!r} is frozen on {frozen} only, must be on all or none")
    layouts = {(term.layout, sum(map(len, term.tensors))) for term in terms.values() if term.layout != ABSENT}
    if len(layouts) > 1:
        raise StageError(f"tie {tie!r} has gradients of different dtypes or placements on its virtual stages")
    return next(iter(layouts), (ABSENT, 0))[0]


def _write(flat: Tensor, pieces: Iterable[Tensor]) -> None:
    start = 0
    for piece in pieces:
        flat[start : start + len(piece)].copy_(piece)
        start += len(piece)


def _add(flat: Tensor, pieces: Iterable[Tensor]) -> None:
    start = 0
    for piece in pieces:
        flat[start : start + len(piece)].add_(piece.to(flat.device))
        start += len(piece)
