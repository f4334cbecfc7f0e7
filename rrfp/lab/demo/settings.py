"""The settings of a demo run, shared by the command that starts it and the workers that run it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rrfp.costs import CostTable, make_costs
from rrfp.errors import ConfigError, Faults
from rrfp.lab.demo.methods import DemoMethod, check_methods, demo_methods
from rrfp.lab.demo.model import GptConfig
from rrfp.lab.generators.profiles import microbatch_sizes

#: The cost table that tasks are stretched to.
PROFILE = "mllm"
JITTER = "J2"

MICROBATCH_SIZE = 4
SEQUENCE_LENGTH = 128
LEARNING_RATE = 3e-3


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """One demo run."""

    #: Folder for all files that it writes.
    out: str
    #: a file to learn, or None for the language reference.
    text: str | None = None
    #: N, one process each.
    stages: int = 4
    #: M.
    microbatches: int = 24
    #: Steps of each method that are not measured.
    warm_up: int = 1
    #: Measured steps of each method.
    steps: int = 8
    #: Of model, data and cost tables.
    seed: int = 0
    #: Tasks are not stretched to a cost table.
    real_compute: bool = False
    #: Every method trains bitwise the same model.
    deterministic: bool = False
    #: The hints of the readiness-driven methods, between commas; None for those of `METHODS`.
    hint: str | None = None
    #: Their memory limit; None for the default of `rrfp.Pipeline`. The row ``v`` keeps its own.
    limit: str | None = None
    #: Whether they split backward; None: those of `METHODS` as they say there, any other hint does not.
    split: bool | None = None
    #: Of all methods: a name, ``module:attribute`` or ``file.py:attribute``.
    transport: str = "auto"

    def __post_init__(self) -> None:
        layers = GptConfig().layers
        with Faults() as faults:
            if not 2 <= self.stages <= layers:
                with faults.kept():
                    raise ConfigError(f"stages is {self.stages}, must be 2..{layers} (the model has {layers} layers)")
            for field, least in (("microbatches", 1), ("steps", 1), ("warm_up", 0), ("seed", 0)):
                if getattr(self, field) < least:
                    with faults.kept():
                        name = field.replace("_", "-")
                        raise ConfigError(f"{name} is {getattr(self, field)}, must be at least {least}")
            with faults.kept():
                check_methods(self.methods, self.transport)

    @property
    def methods(self) -> Mapping[str, DemoMethod]:
        """The compared methods by name; the first is the baseline."""
        return demo_methods(self.hint, self.limit, self.split)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DemoSettings:
        """Read `to_json`'s line back."""
        return cls(**json.loads(text))

    def costs(self, step: int, method: DemoMethod, *, split: bool | None = None) -> CostTable:
        """The least seconds of each task, cut as ``method`` cuts the model."""
        # The same work for every method; ``split`` replaces the method's own.
        return make_costs(
            PROFILE,
            self.stages,
            self.microbatches,
            chunks=method.chunks,
            placement=method.placement,
            split=method.split if split is None else split,
            seed=self.seed,
            step=step,
            jitter=JITTER,
        )

    def sizes(self, step: int) -> tuple[float, ...]:
        """The sizes of the microbatches of ``step``, known before it."""
        return microbatch_sizes(PROFILE, self.stages, self.microbatches, seed=self.seed, step=step)
