"""What the memory benchmark is made of; shared by its command and its workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rrfp.costs import CostTable, make_costs, microbatch_sizes
from rrfp.memory.admission import Limit

PROFILE, JITTER = "mllm", "J2"
#: How many times slower than the table's a task is: real compute on a few cores needs that long.
SLOWER = 3.5

#: Floats of a row between stages, and inside one.
NARROW, WIDE = 16, 64
#: Parts of the model on a stage: one on each of two chunks.
PARTS = 2

BASELINE = "1f1b"

#: Hints by name, and whether they run with a split backward.
HINTS = {"bf": False, "b-priority": False, "f-priority": False, "bfw": True, "slot-aware-pyramid": True}
#: ``bytes``: what strict 1F1B holds on its fullest stage.
LIMITS = ("1", "1f1b", "n", "2n", "bytes")
#: What the same hint held on the same stage within N microbatches; measured with ragged microbatches.
OWN_BYTES = "n's bytes"


@dataclass(frozen=True, slots=True)
class Method:
    """One way to run the pipeline.

    Attributes:
        name: a hint's or a schedule's.
        limit: one of `LIMITS`, or `OWN_BYTES`; empty for a schedule run to the letter.
        split: whether backward is split.
        chunks: of a stage; with two the placement is V.
    """

    name: str
    limit: str = ""
    split: bool = False
    chunks: int = 1

    @property
    def placement(self) -> Literal["looped", "v"]:
        """Where chunks are."""
        return "looped" if self.chunks == 1 else "v"

    def options(self, most_bytes: int) -> dict[str, Any]:
        """Of the pipeline; ``most_bytes``: its limit, if that is one on bytes."""
        shared = {"split": self.split, "chunks": self.chunks, "placement": self.placement}
        if not self.limit:
            return {"strict": self.name, **shared}
        limit = Limit(bytes=most_bytes) if self.limit in ("bytes", OWN_BYTES) else self.limit
        return {"hint": self.name, "limit": limit, **shared}


STRICT = (Method(BASELINE), Method("zb-h1", split=True), Method("zb-v", split=True, chunks=2))


@dataclass(frozen=True, slots=True)
class Settings:
    """One run.

    Attributes:
        stages: N, one process each.
        microbatches: M.
        rows: of a microbatch.
        rounds: measured steps a method.
        hints: those that are measured.
        seed: of the cost tables.
        ragged: whether microbatches have rows in proportion to their sizes, and hints are told these.
    """

    stages: int = 4
    microbatches: int = 12
    rows: int = 32_768
    rounds: int = 1
    hints: Sequence[str] = tuple(HINTS)
    seed: int = 0
    ragged: bool = False

    @property
    def activation_bytes(self) -> int:
        """Of one activation inside a stage."""
        return self.rows * WIDE * 4

    @property
    def methods(self) -> list[Method]:
        """All, the baseline first."""
        limits = (*LIMITS, OWN_BYTES) if self.ragged else LIMITS
        return [*STRICT, *(Method(hint, limit, HINTS[hint]) for hint in self.hints for limit in limits)]

    def sizes(self, step: int) -> tuple[float, ...] | None:
        """Of the microbatches of ``step``; None where they are equal."""
        if not self.ragged:
            return None
        return microbatch_sizes(PROFILE, self.stages, self.microbatches, seed=self.seed, step=step)

    def rows_of(self, step: int) -> list[int]:
        """Of each microbatch of ``step``: `rows` in the mean."""
        sizes = self.sizes(step) or (1.0,) * self.microbatches
        return [max(1, round(self.rows * size * len(sizes) / sum(sizes))) for size in sizes]

    def costs(self, step: int, method: Method) -> CostTable:
        """What the tasks of ``step`` take at least, before they are slowed down; the same for every method."""
        return make_costs(
            PROFILE,
            self.stages,
            self.microbatches,
            chunks=method.chunks,
            placement=method.placement,
            split=method.split,
            seed=self.seed,
            step=step,
            jitter=JITTER,
        )

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read `to_json`'s line back."""
        return cls(**json.loads(text))
