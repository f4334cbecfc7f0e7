"""The gradients of one rank's copies of tied parameters: taken out, added in the order of virtual stages, put back.

After a step that sums a tie, every copy's ``.grad`` is the sum. Over several steps without ``zero_grad`` that total
must count once: it stays with the first copy, and before the next gradients are added to it the other copies put zeros
in its place. So whatever the caller did to it in between (clipped, scaled, zeroed, dropped it), the same on all copies,
stays done. `rrfp.compute.gradients.reducer` does likewise over replicas, and the two go together: what is left holds
the total once.

Knows no messages: gradients leave and come in pieces of flat memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rrfp.compute.gradients.layout import ABSENT, empty_totals, encode, local_part, zeros
from rrfp.compute.gradients.shared import SharedGradients
from rrfp.compute.gradients.tie_copies import CopyTerms, Tie, TiedCopy, Ties, find_copies
from rrfp.errors import StageError

#: What a piece has at most, in bytes: large enough for speed, small enough that other messages get their turn.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Pieces:
    """A gradient on its way, or that there is none.

    Attributes:
        layout: see `rrfp.compute.gradients.layout.encode`; ``ABSENT`` where there is no gradient.
        learns: whether the copy requires grad.
        tensors: this rank's part of the gradient, cut; one-dimensional, on the CPU, and nobody's to write to.
    """

    layout: int
    learns: bool
    tensors: tuple[Tensor, ...] = ()


class TiedGradients:
    """See the module's docstring. Called on the lane's thread while a step runs, except where said otherwise.

    Args:
        copies: of this rank.
        shared: what virtual stages of the process share.
        repeated: gets, once all ranks agree, the parameters of which a lower virtual stage has a copy, so that their
            gradients repeat that one's.
    """

    def __init__(
        self, copies: Sequence[TiedCopy], shared: SharedGradients, repeated: list[nn.Parameter] | None = None
    ) -> None:
        self.shared = shared
        self._piece_bytes = PIECE_BYTES
        #: What the other ranks compare, once it was read.
        self.terms: tuple[CopyTerms, ...] = ()
        #: The ties of the job, once all ranks agree.
        self.ties: tuple[Tie, ...] = ()
        self._repeated = [] if repeated is None else repeated
        self._copies = {(copy.tie, copy.virtual_stage): copy for copy in copies}
        self._ties: dict[str, Tie] = {}
        #: Parameters whose gradient is a total that another virtual stage has too.
        self._totals: dict[int, nn.Parameter] = {}

    # On the caller's thread.

    def read(self) -> None:
        """Read the values of all copies: they are compared at the start."""
        self.terms = tuple(copy.terms() for copy in self._copies.values())

    def agree(self, ties: Iterable[Tie], most_bytes: int = PIECE_BYTES) -> None:
        """All ranks agree on ``ties``; some of them have copies here.

        Args:
            ties: of the job.
            most_bytes: what can travel at once.
        """
        self.ties = tuple(ties)
        self._piece_bytes = min(PIECE_BYTES, most_bytes)
        self._ties = {tie.name: tie for tie in self.ties}
        for copy in self._copies.values():
            if not copy.is_guest and copy.virtual_stage != self._ties[copy.tie].virtual_stages[0]:
                self._repeated.append(copy.parameter)

    def open(self) -> None:
        """A training step is about to begin: totals that the first copies hold become zeros elsewhere."""
        empty_totals(self._totals)

    # On the lane's thread.

    @torch.no_grad()
    def take(self, tie: str, virtual_stage: int) -> Pieces:
        """The gradient of a copy; it stays where it is and must not change while its pieces are read.

        Raises:
            StageError: if it is sparse, or of a kind that cannot be added part by part.
        """
        copy = self._copies[tie, virtual_stage]
        with self.shared.swapped_in(virtual_stage):
            gradient, layout = copy.parameter.grad, encode(copy.parameter, _describe(copy))
        if gradient is None or layout == ABSENT:
            return Pieces(ABSENT, copy.parameter.requires_grad)
        flat = local_part(gradient).contiguous().view(-1)
        cut = torch.split(flat, max(1, self._piece_bytes // flat.element_size()))
        return Pieces(layout, True, tuple(piece.to("cpu") for piece in cut))

    @torch.no_grad()
    def add(self, tie: str, others: Mapping[int, Pieces]) -> Pieces:
        """Add up all copies of a tie whose first copy is here, in the order of virtual stages; all copies here get it.

        Args:
            tie: the tie's name.
            others: the gradients of the copies of other ranks, by virtual stage.

        Raises:
            StageError: if copies differ in layout, or only some of them learn.
        """
        stages = self._ties[tie].virtual_stages
        own = [v for v in stages if v not in others]
        terms = {v: others[v] if v in others else self.take(tie, v) for v in stages}
        layout = _common_layout(tie, terms)
        if layout == ABSENT:
            return Pieces(ABSENT, all(term.learns for term in terms.values()))
        first, *rest = (term.tensors for term in terms.values() if term.layout != ABSENT)
        copy = self._copies[tie, stages[0]]
        with self.shared.swapped_in(stages[0]):
            parameter = copy.parameter
            if parameter.grad is None:
                parameter.grad = zeros(parameter, layout)
            part = local_part(parameter.grad)
        total = part.contiguous().view(-1)
        if terms[stages[0]].layout == ABSENT:
            _write(total, first)
        for tensors in rest:
            _add(total, tensors)
        if total.data_ptr() != part.data_ptr():
            part.copy_(total.view(part.shape))
        pieces = self.take(tie, stages[0])
        self._put(tie, own[1:], pieces)
        return pieces

    @torch.no_grad()
    def put(self, tie: str, pieces: Pieces) -> None:
        """Give all copies here the sum of a tie, or leave them as they are where it has none."""
        self._put(tie, [v for name, v in self._copies if name == tie], pieces)

    def _put(self, tie: str, virtual_stages: Iterable[int], pieces: Pieces) -> None:
        for v in virtual_stages:
            copy = self._copies[tie, v]
            with self.shared.swapped_in(v):
                self._put_one(copy, pieces)

    def _put_one(self, copy: TiedCopy, pieces: Pieces) -> None:
        parameter = copy.parameter
        if copy.is_guest:  # the object's gradient is at home
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
    """The ties of the ranks of one process.

    Args:
        ties: by name the parameters of all ranks of this process, or such a mapping for each rank.
        modules: of each rank by virtual stage.

    Raises:
        ConfigError: if ``ties`` is something else, or names a parameter that the modules do not have, or twice.

    Attributes:
        shared: what virtual stages of the process share.
        ranks: what is tied, for each rank.
        repeated: see `TiedGradients`; of all ranks of the process.
    """

    def __init__(self, ties: Ties | Sequence[Ties] | None, modules: Sequence[Mapping[int, nn.Module]]) -> None:
        self.shared = SharedGradients({v: module for own in modules for v, module in own.items()})
        self.repeated: list[nn.Parameter] = []
        copies = find_copies(ties, modules, self.shared)
        self.ranks = [
            TiedGradients([copy for copy in copies if copy.virtual_stage in own], self.shared, self.repeated)
            for own in modules
        ]


def _common_layout(tie: str, terms: Mapping[int, Pieces]) -> int:
    """The layout of the gradients that are there.

    Raises:
        StageError: if there are several, or only some copies learn.
    """
    if len({term.learns for term in terms.values()}) > 1:
        frozen = ", ".join(str(v) for v, term in terms.items() if not term.learns)
        raise StageError(f"tie {tie!r} is frozen on the virtual stages {frozen} only, must be on all or none")
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


def _describe(copy: TiedCopy) -> str:
    return f"tie {copy.tie!r} on virtual stage {copy.virtual_stage}"
