"""The trainings of the parity experiment: models, seeds and methods; shared by its command and its workers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

from rrfp.pipeline.options import OptionArguments

STAGES = 4
#: The paper's.
SEEDS = (42, 1234, 2026)
ITERATIONS, EVALUATED_EVERY = 500, 50

GPT, MULTIMODAL = "gpt", "multimodal"


class Runtime(StrEnum):
    """What runs a training."""

    ONE_PROCESS = "one process"
    TORCH = "torch"
    MEGATRON = "Megatron"
    IN_MEGATRON = "RRFP in Megatron's place"
    RRFP = "RRFP"


@dataclass(frozen=True, slots=True)
class Method:
    """One way to train.

    Attributes:
        runtime: what runs it.
        options: of RRFP's pipeline.
        fixes_bits: whether its losses and parameters are to be those of one process, to the bit.
    """

    runtime: Runtime
    options: OptionArguments = field(default_factory=lambda: OptionArguments())
    fixes_bits: bool = True


ONE_PROCESS = "one process"

_HINTS: Mapping[str, OptionArguments] = {
    "default": {"split": True},
    "bf": {"hint": "bf"},
    "strict 1f1b": {"strict": "1f1b"},
}
_RRFP = {
    **{
        f"{name}, deterministic": Method(Runtime.RRFP, {**options, "deterministic": True})
        for name, options in _HINTS.items()
    },
    **{name: Method(Runtime.RRFP, options, fixes_bits=False) for name, options in _HINTS.items()},
}

#: By model. torch's and Megatron's schedules know chains of stages only.
METHODS: Mapping[str, Mapping[str, Method]] = {
    GPT: {
        ONE_PROCESS: Method(Runtime.ONE_PROCESS),
        "torch 1F1B": Method(Runtime.TORCH),
        "Megatron 1F1B": Method(Runtime.MEGATRON),
        "RRFP in Megatron's place": Method(Runtime.IN_MEGATRON),
        **_RRFP,
    },
    MULTIMODAL: {ONE_PROCESS: Method(Runtime.ONE_PROCESS), **_RRFP},
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The trainings that one set of processes runs, one after the other.

    Attributes:
        model: `GPT` or `MULTIMODAL`.
        seed: of weights and data.
        methods: names.
        iterations: of each training.
        evaluated_every: iterations from one evaluation to the next.
        microbatches: M.
    """

    model: str
    seed: int
    methods: tuple[str, ...]
    iterations: int = ITERATIONS
    evaluated_every: int = EVALUATED_EVERY
    microbatches: int = 8

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read `to_json`'s line back."""
        plain: dict[str, Any] = json.loads(text)
        return cls(**{**plain, "methods": tuple(plain["methods"])})


def wanted(*, full: bool) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Model, seed and methods: all, or those of the GPT for one seed, and one process for the others."""
    for model in (GPT, MULTIMODAL) if full else (GPT,):
        for seed in SEEDS:
            is_whole = full or seed == SEEDS[0]
            yield model, seed, tuple(METHODS[model]) if is_whole else (ONE_PROCESS,)
