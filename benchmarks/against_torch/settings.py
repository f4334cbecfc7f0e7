"""The methods and sizes of the comparison; shared by its command and its workers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, cast

from benchmarks.against_torch.tables import Form, make_table
from rrfp.costs import CostTable
from rrfp.pipeline.options import Options

JITTERS = ("J0", "J3")

#: Bytes of every tensor between virtual stages.
NUM_BYTES = 2 << 20


class Runtime(StrEnum):
    """What runs a method."""

    TORCH = "torch"
    RRFP = "rrfp"


@dataclass(frozen=True, slots=True)
class Method:
    """One way to run a step.

    Attributes:
        runtime: what runs it.
        form: of its table.
        options: of RRFP's pipeline.
        has_sizes: whether a step is given ``sizes``.
    """

    runtime: Runtime
    form: Form
    options: Options = field(default_factory=lambda: Options())
    has_sizes: bool = False

    def runs(self, profile: str) -> bool:
        """Whether it is measured: sizes that are all alike change nothing."""
        return not self.has_sizes or profile != "llm"


def _rrfp(form: Form, *, has_sizes: bool = False, **options: Any) -> Method:
    if form is not Form.WHOLE:
        options["split"] = True
    if form is Form.V:
        options["placement"] = "v"
    return Method(Runtime.RRFP, form, cast("Options", options), has_sizes)


TORCH_1F1B, TORCH_ZBV, TORCH_GPIPE = "torch 1F1B", "torch ZBV", "torch GPipe"
STRICT_1F1B, V_N = "strict 1f1b", "V, n"

#: All methods by name. Those without another remark are RRFP's, with the default hint and a split backward.
METHODS: Mapping[str, Method] = {
    TORCH_1F1B: Method(Runtime.TORCH, Form.WHOLE),
    TORCH_ZBV: Method(Runtime.TORCH, Form.V),
    STRICT_1F1B: _rrfp(Form.WHOLE, strict="1f1b"),
    "strict zb-v": _rrfp(Form.V, strict="zb-v"),
    "1f1b": _rrfp(Form.SPLIT, limit="1f1b"),
    "n": _rrfp(Form.SPLIT, limit="n"),
    "2n": _rrfp(Form.SPLIT, limit="2n"),
    "1f1b, sizes": _rrfp(Form.SPLIT, limit="1f1b", has_sizes=True),
    "n, sizes": _rrfp(Form.SPLIT, limit="n", has_sizes=True),
    "2n, sizes": _rrfp(Form.SPLIT, limit="2n", has_sizes=True),
    V_N: _rrfp(Form.V, limit="n"),
    TORCH_GPIPE: Method(Runtime.TORCH, Form.WHOLE),
    "strict gpipe": _rrfp(Form.WHOLE, strict="gpipe"),
    "strict zb-h1": _rrfp(Form.SPLIT, strict="zb-h1"),
    "bf, 1f1b": _rrfp(Form.WHOLE, hint="bf", limit="1f1b"),
    "bf, 2n": _rrfp(Form.WHOLE, hint="bf", limit="2n"),
    "V, n, sizes": _rrfp(Form.V, limit="n", has_sizes=True),
    "V, 2n": _rrfp(Form.V, limit="2n"),
    "strict 1f1b, zmq": _rrfp(Form.WHOLE, strict="1f1b", transport="zmq"),
    "n, zmq": _rrfp(Form.SPLIT, limit="n", transport="zmq"),
}
#: Measured where no others are asked for: all up to V, n.
DEFAULT_METHODS = tuple(METHODS)[: list(METHODS).index(V_N) + 1]

PEERS = (TORCH_1F1B, TORCH_ZBV)


def peer_in_time(method: Method) -> str:
    """The peer whose stages' tasks are as long, so that the same time lost is the same share of a step."""
    return TORCH_ZBV if method.form is Form.V else TORCH_1F1B


def peer_in_cpu(method: Method) -> str:
    """The peer with as many messages a task: two for F and B, where backward is split two for F, B and W."""
    return TORCH_1F1B if method.form is Form.WHOLE else TORCH_ZBV


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


@dataclass(frozen=True, slots=True)
class Settings:
    """The steps that one set of processes runs.

    Attributes:
        stages: N, one process each.
        profiles: the workloads.
        jitters: their levels.
        methods: names.
        microbatches: M.
        rounds: measured steps of each method in each cell.
        seed: of the cost tables.
    """

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
    def from_json(cls, text: str) -> Settings:
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
                    if METHODS[method].runs(cell.profile):
                        yield Turn(cell, number, method)
                first = (first + 1) % len(self.methods)

    def table(self, turn: Turn, form: Form | None = None) -> CostTable:
        """The durations of a step: the same for every method, but for its form, which may be another one."""
        wanted = METHODS[turn.method].form if form is None else form
        _, profile, jitter = turn.cell
        numbers = {"seed": self.seed, "step": turn.number}
        return make_table(wanted, profile, self.stages, self.microbatches, jitter=jitter, **numbers)
