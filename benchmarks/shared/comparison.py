"""A comparison of ways to run a step: the methods, and the steps in which they alternate on the same cost tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, Self

from benchmarks.shared.tables import Form, make_table
from rrfp.costs import CostTable, microbatch_sizes
from rrfp.pipeline.options import OptionArguments

JITTERS = ("J0", "J3")

#: Bytes of every tensor between virtual stages.
NUM_BYTES = 2 << 20


class Runtime(StrEnum):
    """What runs a method."""

    TORCH = "torch"
    MEGATRON = "megatron"
    DEEPSPEED = "deepspeed"
    RRFP = "rrfp"


@dataclass(frozen=True, slots=True)
class Method:
    """One way to run a step.

    Attributes:
        runtime: what runs it.
        form: of its table.
        options: of RRFP's pipeline.
        has_sizes: whether a step is given ``sizes``.
        own_bytes: whether its limit is on bytes: on each stage those that its hint holds there within N microbatches.
    """

    runtime: Runtime
    form: Form
    options: OptionArguments = field(default_factory=lambda: OptionArguments())
    has_sizes: bool = False
    own_bytes: bool = False

    def runs(self, profile: str) -> bool:
        """Whether it is measured: sizes that are all alike change nothing."""
        return not self.has_sizes or profile != "llm"


class Cell(NamedTuple):
    """Circumstances under which all methods are compared."""

    stages: int
    profile: str
    jitter: str

    def __str__(self) -> str:
        return f"PP {self.stages}, {self.profile}, {self.jitter}"


class Turn(NamedTuple):
    """One step of one method; rounds count from 1, round 0 warms up."""

    cell: Cell
    number: int
    method: str

    @classmethod
    def of(cls, plain: Sequence[Any]) -> Self:
        """As a report has it."""
        cell, number, method = plain
        return cls(Cell(*cell), number, method)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The steps that one set of processes runs.

    Attributes:
        METHODS: all that can be compared, by name.
        PEERS: those beside which the others are shown.
        stages: N, one process each.
        profiles: the workloads.
        jitters: their levels.
        methods: names.
        microbatches: M.
        rounds: measured steps of each method in each cell.
        seed: of the cost tables.
    """

    METHODS: ClassVar[Mapping[str, Method]]
    PEERS: ClassVar[tuple[str, ...]]

    stages: int
    profiles: tuple[str, ...]
    jitters: tuple[str, ...]
    methods: tuple[str, ...]
    microbatches: int = 32
    rounds: int = 3
    seed: int = 1

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read `to_json`'s line back."""
        plain: dict[str, Any] = json.loads(text)
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
        return cls(**values)

    def turns(self) -> Iterator[Turn]:
        """All steps in order: the methods alternate, and the first one changes from cell to cell."""
        cells = [Cell(self.stages, profile, jitter) for profile in self.profiles for jitter in self.jitters]
        for method in self.methods:
            yield Turn(cells[0], 0, method)
        first = 0
        for number in range(1, self.rounds + 1):
            for cell in cells:
                for method in (*self.methods[first:], *self.methods[:first]):
                    if self.METHODS[method].runs(cell.profile):
                        yield Turn(cell, number, method)
                first = (first + 1) % len(self.methods)

    def table(self, turn: Turn, form: Form | None = None) -> CostTable:
        """The durations of a step: the same for every method, but for its form, which may be another one."""
        wanted = self.METHODS[turn.method].form if form is None else form
        _, profile, jitter = turn.cell
        numbers = {"seed": self.seed, "step": turn.number}
        return make_table(wanted, profile, self.stages, self.microbatches, jitter=jitter, **numbers)

    def reference(self, turn: Turn) -> CostTable:
        """The table whose lower bound serves all methods of a cell: that of whole tasks on one chunk."""
        return self.table(turn, Form.WHOLE)

    def order_alone(self, turn: Turn) -> float | None:
        """Seconds of the method's step in the engine, where messages take no time; None: it always has one order."""
        return None

    def sizes(self, turn: Turn) -> Sequence[float] | None:
        """The microbatches' sizes, for a method that takes them."""
        if not self.METHODS[turn.method].has_sizes:
            return None
        numbers = {"seed": self.seed, "step": turn.number}
        return microbatch_sizes(turn.cell.profile, self.stages, self.microbatches, **numbers)
