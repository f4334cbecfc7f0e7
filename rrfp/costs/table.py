"""The costs of one step: the durations of tasks and the latencies of messages.

`CostTable` is the cost file in memory (the names in brackets are the file's). It knows durations and the placement, and
nothing of schedules, hints, limits or randomness. Every table is complete and valid: the constructor checks all fields.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from rrfp.core.placement import Layout, Placement
from rrfp.costs.streams import Matrix, whole
from rrfp.errors import ConfigError

PLACEMENTS: tuple[str, ...] = get_args(Layout)
#: Matrices of a row for each virtual stage that a table may lack: name in the file -> attribute.
_OPTIONAL = {"W": "weight", "bytes": "held"}

#: numpy's sizes are numbers of 64 bits. The product of two counts fits into a line of an error.
_MOST_COUNT = 2**63 - 1


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CostTable:
    """Durations and latencies of one step, in seconds; V = stages x chunks virtual stages, M microbatches.

    A matrix may be any nested sequence of the right shape; it is copied, checked and made read-only.

    Attributes:
        stages: number of stages N >= 1 ("stages").
        chunks: chunks a stage C >= 1 ("chunks").
        placement: which stage holds which virtual stage: "looped" or "v" ("placement").
        microbatches: number of microbatches M >= 1 ("microbatches").
        forward: V x M: forward durations ("F").
        backward: V x M: backward durations, of the input gradient only when `weight` is given ("B").
        weight: V x M: weight-gradient durations, or None if backward is not split ("W").
        latency_forward: V-1 x M: row v is from the end of F on v to its arrival at v + 1 ("latency_F").
        latency_backward: V-1 x M: row v is from the end of B on v + 1 to its arrival at v ("latency_B").
        held: V x M: bytes that a microbatch holds on a virtual stage from the end of its F to the end of its last task
            ("bytes"), or None if the table has no sizes. Fractions are cut off.

    Raises:
        ConfigError: if a size, shape or entry is wrong; the message names the field as the cost file does.
    """

    stages: int
    chunks: int
    placement: Layout
    microbatches: int
    forward: Matrix
    backward: Matrix
    weight: Matrix | None
    latency_forward: Matrix
    latency_backward: Matrix
    held: Matrix | None = None

    def __post_init__(self) -> None:
        for field in ("stages", "chunks", "microbatches"):
            count = whole(field, getattr(self, field), 1)
            if count > _MOST_COUNT:
                raise ConfigError(f"{field} is a number of {count.bit_length()} bits, must be at most {_MOST_COUNT}")
            object.__setattr__(self, field, count)
        if self.placement not in PLACEMENTS:
            raise ConfigError(f"placement is {reprlib.repr(self.placement)}, must be one of {', '.join(PLACEMENTS)}")
        nodes, edges = self.num_virtual_stages, self.num_virtual_stages - 1
        shapes = [("F", "forward", nodes), ("B", "backward", nodes)]
        shapes += [(name, field, nodes) for name, field in _OPTIONAL.items() if getattr(self, field) is not None]
        shapes += [("latency_F", "latency_forward", edges), ("latency_B", "latency_backward", edges)]
        for name, field, rows in shapes:
            meaning = "stages x chunks" if rows == nodes else "one fewer than stages x chunks"
            object.__setattr__(self, field, _matrix(name, getattr(self, field), rows, self.microbatches, meaning))

    @property
    def num_virtual_stages(self) -> int:
        """V = stages x chunks."""
        return self.stages * self.chunks

    @property
    def split(self) -> bool:
        """Whether backward is split into input gradient (B) and weight gradient (W)."""
        return self.weight is not None

    def stage_of(self, virtual_stage: int) -> int:
        """The stage that holds a virtual stage.

        Args:
            virtual_stage: 0..V-1.
        """
        return Placement(self.stages, self.chunks, self.placement).stage_of(virtual_stage)

    def virtual_stages_of(self, stage: int) -> tuple[int, ...]:
        """The virtual stages that a stage holds, by chunk.

        Args:
            stage: 0..N-1.
        """
        return Placement(self.stages, self.chunks, self.placement).virtual_stages(stage)

    def duration(self, kind: str, virtual_stage: int, microbatch: int) -> float:
        """Seconds for which one task occupies its lane.

        Args:
            kind: "F", "B" or "W".
            virtual_stage: 0..V-1.
            microbatch: 0..M-1.

        Raises:
            ConfigError: if `kind` is unknown, or is "W" and the table is not split.
        """
        rows = {"F": self.forward, "B": self.backward, "W": self.weight}.get(kind)
        if rows is None:
            kinds = "F, B, W" if self.split else "F, B (the costs are not split)"
            raise ConfigError(f"kind is {str(kind)!r}, must be one of {kinds}")
        return float(rows[virtual_stage, microbatch])

    def held_bytes(self, microbatch: int, virtual_stage: int) -> int:
        """Bytes that a microbatch holds on a virtual stage from the end of its F to the end of its last task.

        Args:
            microbatch: 0..M-1.
            virtual_stage: 0..V-1.

        Returns:
            0 if the table has no sizes.
        """
        return 0 if self.held is None else int(self.held[virtual_stage, microbatch])

    def acting_latencies(self) -> tuple[Matrix, Matrix]:
        """The effective forward and backward latencies, both V-1 x M: zero between two chunks of one stage."""
        stages = [self.stage_of(v) for v in range(self.num_virtual_stages)]
        crosses = np.array([here != there for here, there in itertools.pairwise(stages)], dtype=bool)
        keep = crosses[:, np.newaxis]
        return np.where(keep, self.latency_forward, 0.0), np.where(keep, self.latency_backward, 0.0)

    def work(self) -> Matrix:
        """Seconds of lane time of each stage in the step, shape (N,)."""
        total = np.zeros(self.stages)
        for rows in (self.forward, self.backward, self.weight):
            if rows is not None:
                np.add.at(total, [self.stage_of(v) for v in range(self.num_virtual_stages)], rows.sum(axis=1))
        return total

    def to_unsplit(self) -> CostTable:
        """The same step with every B and its W as one task; this table itself if backward is not split."""
        return self if self.weight is None else replace(self, backward=self.backward + self.weight, weight=None)

    def digest(self) -> str:
        """16 hexadecimal digits that two tables share exactly when they are bitwise equal."""
        header = [self.stages, self.chunks, self.placement, self.microbatches, self.split]
        total = hashlib.sha256(json.dumps(header).encode())
        for rows in (self.forward, self.backward, self.weight, self.latency_forward, self.latency_backward):
            if rows is not None:
                total.update(rows.astype("<f8").tobytes())
        if self.held is not None:
            total.update(b"bytes" + self.held.astype("<f8").tobytes())
        return total.hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return self.digest() == other.digest() if isinstance(other, CostTable) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest())

    def __repr__(self) -> str:
        shape = f"stages={self.stages}, chunks={self.chunks}, placement={self.placement!r}"
        return f"CostTable({shape}, microbatches={self.microbatches}, split={self.split}, digest={self.digest()})"


def _length(value: object) -> int | None:
    """The number of entries of a list, tuple or array; None for any other value."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    is_array = isinstance(value, np.ndarray) and value.ndim > 0
    return len(value) if is_list or is_array else None  # type: ignore[arg-type]


def _matrix(name: str, rows: Matrix, num_rows: int, num_columns: int, meaning: str) -> Matrix:
    """A checked, read-only float64 copy of `rows`."""
    length = _length(rows)
    if length is None:
        raise ConfigError(f"{name} must be a list of {num_rows} rows ({meaning})")
    if length != num_rows:
        raise ConfigError(f"{name} has {length} rows, must have {num_rows} ({meaning})")
    for index, row in enumerate(rows):
        entries = _length(row)
        if entries is None:
            raise ConfigError(f"{name}[{index}] must be a list of {num_columns} numbers (one a microbatch)")
        if entries != num_columns:
            raise ConfigError(f"{name}[{index}] has {entries} entries, must have {num_columns} (one a microbatch)")
    try:
        matrix = np.array(rows, dtype=np.float64, order="C") if num_rows else np.empty((0, num_columns))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} must hold finite numbers >= 0 only ({error})") from None
    if matrix.shape != (num_rows, num_columns):
        raise ConfigError(f"{name} must hold numbers only, {num_rows} rows of {num_columns}")
    wrong = ~(np.isfinite(matrix) & (matrix >= 0))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ConfigError(f"{name}[{row}][{column}] is {matrix[row, column]}, must be a finite number >= 0")
    matrix += 0.0  # -0.0 becomes 0.0: equal tables must have equal bytes
    matrix.setflags(write=False)
    return matrix
