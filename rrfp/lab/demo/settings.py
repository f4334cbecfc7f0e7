"""The settings of a demo run, shared by the command that starts it and the workers that run it.

It compares fixed orders with readiness-driven dispatch by hints of the user's choice.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rrfp.costs import CostTable, make_costs
from rrfp.errors import ConfigError, Faults
from rrfp.hints.registry import named_or_loaded_hint
from rrfp.lab.generators.profiles import microbatch_sizes
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Layout
from rrfp.model.topology import Topology
from rrfp.plugins import named_or_loaded
from rrfp.schedules.registry import schedule_names, schedule_needs
from rrfp.trace.job_data import TracedJob
from rrfp.transports.registry import TRANSPORTS, allowed_transports


@dataclass(frozen=True, slots=True)
class DemoMethod:
    """One method, as texts that another process can read."""

    #: a schedule to run to the letter; None for a hint.
    strict: str | None = None
    #: a hint's name, ``module:attribute`` or ``file.py:attribute``; None for a schedule.
    hint: str | None = None
    split: bool = False
    #: Of a hint; None for the default.
    limit: str | None = None
    #: Of the model on each stage.
    chunks: int = 1
    placement: Layout = "looped"

    def options(self) -> dict[str, Any]:
        hint = None if self.hint is None else named_or_loaded_hint(self.hint)
        cut = {"split": self.split, "chunks": self.chunks, "placement": self.placement}
        return {"strict": self.strict, "hint": hint, "limit": self.limit, **cut}

    def traced(self, stages: int) -> TracedJob:
        """What its traces say of it: its lanes are threads, which take offers."""
        from rrfp.pipeline.method import DispatchMethod  # needs torch, which wrong settings do not wait for
        from rrfp.pipeline.options import complete

        options: Any = self.options()
        method = DispatchMethod(complete(options))
        return replace(method.traced(Topology(0, stages), is_serial=False), takes_offers=True)

    def graph(self, stages: int) -> TaskGraph:
        return TaskGraph.chain(stages, chunks=self.chunks, layout=self.placement, split=self.split)


BASELINE = "1f1b"
#: The methods by name, where the user names no hint. The first is the baseline.
METHODS: Mapping[str, DemoMethod] = {
    BASELINE: DemoMethod(strict="1f1b"),
    "zb-h1": DemoMethod(strict="zb-h1", split=True),
    "bf": DemoMethod(hint="bf"),
    "b-priority": DemoMethod(hint="b-priority"),
    "bfw": DemoMethod(hint="bfw", split=True),
    "slot-aware": DemoMethod(hint="slot-aware-pyramid", split=True),
    "v": DemoMethod(hint="slot-aware-pyramid", split=True, limit="n", chunks=2, placement="v"),
}


def demo_methods(hint: str | None, limit: str | None, split: bool | None) -> dict[str, DemoMethod]:
    """The fixed orders, and the readiness-driven methods with these options; see `DemoSettings`."""
    fixed = {name: method for name, method in METHODS.items() if method.hint is None}
    if hint is None:
        driven = {name: method for name, method in METHODS.items() if method.hint is not None}
    else:
        texts = [text.strip() for text in hint.split(",")]
        names = [_row_name(text) for text in texts]
        if (most := Counter(names).most_common(1)[0])[1] > 1:
            raise ConfigError(f"hint is {hint!r}, must give each hint another name than {most[0]!r}")
        driven = {name: DemoMethod(hint=text) for name, text in zip(names, texts, strict=True)}
    for name, method in driven.items():
        # The row of the V is there for what it holds; and 1f1b is no limit of several chunks.
        own = method.limit if method.chunks > 1 else limit
        driven[name] = replace(method, limit=own, split=method.split if split is None else split)
    return {**fixed, **driven}


def _row_name(text: str) -> str:
    """The row's name, also part of a file's; unlike a strict schedule's."""
    name = re.sub(r"[^\w.-]", "-", text.rpartition(":")[2])
    return f"{name}-hint" if name in METHODS and METHODS[name].hint is None else name


def demo_transport(text: str) -> Any:
    """The argument of `rrfp.Pipeline` for the user's transport."""
    spec = named_or_loaded("transport", text)
    if spec == "collective":
        raise ConfigError(
            "transport is 'collective', must be one without plain tcp, as auto, shm and zmq within a host"
        )
    if spec in ("inproc", "simulated") or (spec not in TRANSPORTS.built_in and _is_within_a_process(spec, text)):
        raise ConfigError(f"transport is {text!r}, must connect processes, as auto, shm and zmq do")
    return spec


def _is_within_a_process(spec: Any, text: str) -> bool:
    factory = TRANSPORTS.load(spec) if isinstance(spec, str) else spec
    if not callable(factory):
        raise ConfigError(f"transport is {text!r}, must lead to {allowed_transports()}")
    from rrfp.transports.inproc import InprocTransport

    return isinstance(factory, type) and issubclass(factory, InprocTransport)


def check_methods(methods: Mapping[str, DemoMethod], transport: str) -> None:
    with Faults() as faults:
        with faults.kept():
            demo_transport(transport)
        for method in methods.values():
            with faults.kept():
                Limit.resolve(method.limit, 0, 1)
            with faults.kept():
                hint = method.options()["hint"]
                if isinstance(hint, str) and hint in schedule_names():
                    schedule_needs(hint).check(hint, method.graph(2), "--split splits it")


#: The cost table that tasks are stretched to.
PROFILE = "mllm"
JITTER = "J2"

MICROBATCH_SIZE = 4
SEQUENCE_LENGTH = 128
LAYERS = 4
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
        with Faults() as faults:
            if not 2 <= self.stages <= LAYERS:
                faults.keep(f"stages is {self.stages}, must be 2..{LAYERS} (the model has {LAYERS} layers)")
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
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DemoSettings:
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
