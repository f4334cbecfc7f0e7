"""What this benchmark is made of; shared by its command and its workers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rrfp.costs import CostTable, make_costs

#: ``paced``: tasks are stretched to a cost table, other ones in every step. ``cpu``: they take what they take.
Workload = Literal["paced", "cpu"]
WORKLOADS: tuple[Workload, ...] = ("paced", "cpu")

#: Columns of the matrices.
WIDTH = 256


@dataclass(frozen=True, slots=True)
class Method:
    """One way to run the pipeline: a hint with a limit, or a schedule run to the letter, which has none."""

    name: str
    limit: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """Of `rrfp.Pipeline`, and of `rrfp.lab.simulation.simulate`."""
        return {"hint": self.name, "limit": self.limit} if self.limit else {"strict": self.name}

    def __str__(self) -> str:
        return f"{self.name}, limit {self.limit}" if self.limit else f"strict {self.name}"


#: The first one's trace makes the cost file that predicts all.
METHODS = (Method("bf", "2n"), Method("bf", "1f1b"), Method("b-priority", "n"), Method("1f1b"), Method("gpipe"))


@dataclass(frozen=True, slots=True)
class Settings:
    """One run.

    Attributes:
        workload: what tasks take.
        stages: N, one process each.
        microbatches: M.
        rows: of a microbatch.
        warm_up: steps of each method that do not count.
        steps: those that do.
        seed: of the cost tables.
    """

    workload: Workload = "paced"
    stages: int = 4
    microbatches: int = 12
    rows: int = 128
    warm_up: int = 2
    steps: int = 8
    seed: int = 0

    def layers(self, stage: int) -> int:
        """The last stage has twice the work of the first, without pacing."""
        return 2 + 2 * stage // max(1, self.stages - 1)

    def costs(self, step: int) -> CostTable:
        """What the tasks of ``step`` take at least, the same for every method."""
        return make_costs("mllm", self.stages, self.microbatches, seed=self.seed, step=step, jitter="J1")

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read `to_json`'s line back."""
        return cls(**json.loads(text))
