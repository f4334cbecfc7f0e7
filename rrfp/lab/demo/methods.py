"""The methods that a demo run compares: fixed orders, and readiness-driven dispatch by hints of the user's choice."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rrfp.errors import ConfigError, Faults
from rrfp.hints.registry import named_or_loaded_hint
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Layout
from rrfp.pipeline.method import DispatchMethod
from rrfp.pipeline.options import complete
from rrfp.plugins import named_or_loaded
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.registry import TRANSPORTS


@dataclass(frozen=True, slots=True)
class DemoMethod:
    """One method, as texts that another process can read."""

    #: a schedule to run to the letter; None for a hint.
    strict: str | None = None
    #: a hint's name, ``module:attribute`` or ``file.py:attribute``; None for a schedule.
    hint: str | None = None
    #: Whether backward is split.
    split: bool = False
    #: Of a hint; None for the default.
    limit: str | None = None
    #: Of the model on each stage.
    chunks: int = 1
    placement: Layout = "looped"

    def options(self) -> dict[str, Any]:
        """The options of its `rrfp.Pipeline`."""
        hint = None if self.hint is None else named_or_loaded_hint(self.hint)
        cut = {"split": self.split, "chunks": self.chunks, "placement": self.placement}
        return {"strict": self.strict, "hint": hint, "limit": self.limit, **cut}

    def graph(self, stages: int) -> TaskGraph:
        """Its virtual stages on ``stages`` stages."""
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
    factory = TRANSPORTS.load(spec) if isinstance(spec, str) else spec
    if isinstance(factory, type) and issubclass(factory, InprocTransport):
        raise ConfigError(f"transport is {text!r}, must connect processes, as auto, shm and zmq do")
    if spec == "collective":
        raise ConfigError(
            "transport is 'collective', must be one without plain tcp, as auto, shm and zmq within a host"
        )
    return spec


def check_methods(methods: Mapping[str, DemoMethod], transport: str) -> None:
    """Refuse methods that the workers would refuse."""
    with Faults() as faults:
        with faults.kept():
            complete({"transport": demo_transport(transport)})
        for method in methods.values():
            with faults.kept():
                complete({"limit": method.limit})
            with faults.kept():
                options: Any = method.options()
                DispatchMethod(complete(options)).check(method.graph(2))
