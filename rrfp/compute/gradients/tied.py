"""The gradients of one rank's copies of tied parameters: cut into pieces, added in the order of virtual stages.

After a step that sums a tie, every copy's ``.grad`` is the sum. Over several steps without ``zero_grad`` that total
must count once: the first copy keeps it, and before the next gradients are added the other copies replace it by zeros.
So any change that the caller makes in between (clipping, scaling, zeroing, dropping) lasts, if it is the same on all
copies. `rrfp.compute.gradients.reducer` does the same over replicas. The two combine: only the first copy on the first
replica keeps the total.

This module knows no messages: gradients leave and arrive as pieces of flat memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rrfp.compute.gradients.layout import ABSENT, checksum, empty_totals, encode, local_part, zeros
from rrfp.compute.gradients.shared import SharedGradients
from rrfp.compute.gradients.tie_copies import CopySettings, Tie, TiedCopy, Ties, find_copies
from rrfp.errors import ConfigError, StageError
from rrfp.model.names import TextOf, numbered

#: The most bytes of a piece: large enough for speed, small enough that other messages do not wait long behind it.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Pieces:
    """The gradient of a copy or the sum of a tie, as it is sent; possibly absent."""

    #: See `rrfp.compute.gradients.layout.encode`; ``ABSENT`` if there is no gradient.
    layout: int
    #: Whether the copy requires grad.
    requires_grad: bool
    #: This rank's part of the gradient, cut into pieces: one-dimensional, on the CPU, read-only.
    tensors: tuple[Tensor, ...] = ()
    #: The checksum of the copy's values, in a step in which copies are compared.
    checksum: int | None = None


class TiedGradients:
    """The copies of one rank. Methods of a running step are called on the lane's thread.

    Args:
        copies: of this rank.
        shared: the parameters that virtual stages of the process share.
        repeated: receives, once all ranks agree, the parameters whose gradients repeat those of a lower virtual stage.
        text_of: names virtual stages in errors.
        check_every: in each so many steps that sum gradients the values of the copies are compared; 0: never.
    """

    def __init__(
        self,
        copies: Sequence[TiedCopy],
        shared: SharedGradients,
        repeated: list[nn.Parameter] | None = None,
        text_of: TextOf = numbered,
        check_every: int = 0,
    ) -> None:
        self._text_of = text_of
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
        self._repeated = [] if repeated is None else repeated
        self._copies = {(copy.tie, copy.virtual_stage): copy for copy in copies}
        self._ties: dict[str, Tie] = {}
        #: Parameters whose gradient is a total that the first copy keeps.
        self._totals: dict[int, nn.Parameter] = {}

    # Called on the caller's thread.

    def read(self) -> None:
        """Read the values of all copies, which ranks compare in the handshake; ConfigError as in `check`."""
        self.check()
        self.settings = tuple(copy.settings() for copy in self._copies.values())

    def agree(self, ties: Iterable[Tie], most_bytes: int = PIECE_BYTES) -> None:
        """Keep all ties of the job, on which the ranks agreed; a message has ``most_bytes`` at most."""
        self.ties = tuple(ties)
        self._piece_bytes = min(PIECE_BYTES, most_bytes)
        self._ties = {tie.name: tie for tie in self.ties}
        for copy in self._copies.values():
            if not copy.is_guest and copy.virtual_stage != self._ties[copy.tie].virtual_stages[0]:
                self._repeated.append(copy.parameter)

    def check(self) -> None:
        """Refuse a copy that its module has no more: the gradients of the object in its place would not be summed."""
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
        """The gradient of a copy, cut into pieces that may share its memory: it must not change while they are read."""
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
        """Sum a tie whose first copy is on this rank, in the order of virtual stages, into all copies of this rank.

        ``others`` are the gradients of other ranks' copies, by virtual stage. Returns the sum for these ranks; a
        StageError if copies differ in layout, or only some of them require grad.
        """
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
        """Write the sum of a tie into all copies of this rank; an absent sum changes nothing."""
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
    """The ties of the ranks of one process. See `find_copies`, and `TiedGradients` for ``check_every``."""

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
    """The layout of the gradients that are not absent; a StageError if several, or if only some copies require grad."""
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
