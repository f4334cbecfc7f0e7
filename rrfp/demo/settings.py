"""The settings of a demo run, shared by the command that starts it and the workers that run it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rrfp.costs import CostTable, make_costs
from rrfp.costs.profiles import microbatch_sizes
from rrfp.demo.model import GptConfig
from rrfp.errors import ConfigError

#: The compared methods and their pipeline options. The first is the baseline.
METHODS: Mapping[str, Mapping[str, Any]] = {
    "1f1b": {"strict": "1f1b", "split": False},
    "zb-h1": {"strict": "zb-h1", "split": True},
    "bf": {"hint": "bf", "split": False},
    "b-priority": {"hint": "b-priority", "split": False},
    "bfw": {"hint": "bfw", "split": True},
    "slot-aware": {"hint": "slot-aware-pyramid", "split": True},
}
BASELINE = "1f1b"

#: The cost table that tasks are stretched to.
PROFILE = "mllm"
JITTER = "J2"

MICROBATCH_SIZE = 4
SEQUENCE_LENGTH = 128
LEARNING_RATE = 3e-3


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """One demo run.

    Attributes:
        out: folder for all files that it writes.
        text: a file to learn, or None for the language reference.
        stages: N, one process each.
        microbatches: M.
        warm_up: steps of each method that are not measured.
        steps: measured steps of each method.
        seed: of model, data and cost tables.
        real_compute: tasks are not stretched to a cost table.
        deterministic: every method trains bitwise the same model.

    Raises:
        ConfigError: if a count is out of range.
    """

    out: str
    text: str | None = None
    stages: int = 4
    microbatches: int = 24
    warm_up: int = 1
    steps: int = 8
    seed: int = 0
    real_compute: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        layers = GptConfig().layers
        if not 2 <= self.stages <= layers:
            raise ConfigError(f"stages is {self.stages}, must be 2..{layers} (the model has {layers} layers)")
        for field in ("microbatches", "steps"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} is {getattr(self, field)}, must be at least 1")
        for field in ("warm_up", "seed"):
            if getattr(self, field) < 0:
                raise ConfigError(f"{field} is {getattr(self, field)}, must be at least 0")

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DemoSettings:
        """Read `to_json`'s line back."""
        return cls(**json.loads(text))

    def costs(self, step: int, *, split: bool) -> CostTable:
        """The least seconds of each task of ``step``: the same for every method, with or without split backward."""
        return make_costs(
            PROFILE, self.stages, self.microbatches, split=split, seed=self.seed, step=step, jitter=JITTER
        )

    def sizes(self, step: int) -> tuple[float, ...]:
        """The sizes of the microbatches of ``step``, known before it."""
        return microbatch_sizes(PROFILE, self.stages, self.microbatches, seed=self.seed, step=step)
