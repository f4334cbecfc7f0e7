"""What this benchmark is made of; shared by its command and its workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from rrfp.costs import CostTable, make_costs, microbatch_sizes
from rrfp.costs.table import MATRICES

#: Tables that are drawn for the steps.
PROFILES = ("llm", "mllm", "zipf")


@dataclass(frozen=True, slots=True)
class Job:
    """One way to run the same tables; the first one's trace predicts all."""

    name: str
    hint: str = "slot-aware-pyramid"
    limit: str = "1f1b"
    split: bool = False
    #: Steps that are joined to one.
    joins: int = 1
    #: A schedule, in place of hint and limit.
    strict: str | None = None

    @property
    def options(self) -> Mapping[str, Any]:
        """Of `rrfp.Pipeline`."""
        return {"hint": self.hint, "limit": self.limit, "split": self.split}


JOBS = (
    Job("as recorded"),
    Job("limit n", limit="n"),
    Job("limit 2n", limit="2n"),
    Job("hint bf", hint="bf"),
    Job("split", split=True),
    Job("twice as many microbatches", joins=2),
)

#: Rows of `rrfp demo`, on one chunk a stage, as what is predicted from the first one's trace.
DEMO = {
    "bf": Job("as recorded", hint="bf", limit="2n"),
    "b-priority": Job("hint b-priority", hint="b-priority", limit="2n"),
    "1f1b": Job("strict 1f1b", strict="1f1b"),
    "bfw": Job("split, hint bfw", hint="bfw", limit="2n", split=True),
    "slot-aware": Job("split, default hint", limit="2n", split=True),
    "zb-h1": Job("split, strict zb-h1", strict="zb-h1", split=True),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """One run.

    Attributes:
        profile: of the tables, with jitter J1.
        stages: N, one process each.
        microbatches: M.
        num_bytes: of a message.
        warm_up: steps of each job that do not count.
        steps: those that do, an even number; every job runs the same tables in them.
        seed: of the tables.
    """

    profile: str = "mllm"
    stages: int = 4
    microbatches: int = 12
    num_bytes: int = 1_000_000
    warm_up: int = 2
    steps: int = 8
    seed: int = 0

    def costs(self, job: Job, step: int) -> CostTable:
        """What the tasks of a step take."""
        shape: Any = {"seed": self.seed, "jitter": "J1", "split": True}
        tables = []
        for number in range(job.joins * step, job.joins * (step + 1)):
            table = make_costs(self.profile, self.stages, self.microbatches, step=number, **shape)
            whole = table.to_unsplit().backward
            # Weight gradients take half of backward, jitter included.
            tables.append(replace(table, backward=whole / 2, weight=whole / 2) if job.split else table.to_unsplit())
        return joined(tables)

    def sizes(self, job: Job, step: int) -> list[float]:
        """Of the microbatches of a step, as a trainer knows them before."""
        numbers = range(job.joins * step, job.joins * (step + 1))
        make = [microbatch_sizes(self.profile, self.stages, self.microbatches, seed=self.seed, step=n) for n in numbers]
        return [size for sizes in make for size in sizes]

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read `to_json`'s line back."""
        return cls(**json.loads(text))


def joined(tables: list[CostTable]) -> CostTable:
    """One step with the microbatches of several."""
    fields: dict[str, Any] = {"microbatches": sum(table.microbatches for table in tables)}
    for name in MATRICES.values():
        rows = [own for table in tables if (own := getattr(table, name)) is not None]
        fields[name] = np.concatenate(rows, axis=1) if rows else None
    return replace(tables[0], **fields)
