"""The options of `rrfp simulate` that describe a model whose parts form a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rrfp.commands.command_line import option
from rrfp.errors import ConfigError, Faults
from rrfp.lab.commands.known_workloads import known_latencies
from rrfp.lab.commands.method_options import WORKLOAD, Texts, choice

if TYPE_CHECKING:
    from rrfp.lab.sweep.workloads import MultimodalWorkload

_PROFILE = (
    "Instead of a cost file: multimodal, a model whose parts form a graph. rrfp sweep has the profiles of chains."
)
_GRAPH = "Where the parts of the model are; default branch."
_SHARE = "Share of microbatches with {}, which take as much longer; default {}."
_SKIP = "Whether microbatches skip an encoder that has nothing to do for them, or visit it for no time. Not with chain."
_SPLIT = "Split backward into input gradient and weight gradient."
_LATENCY = "none, constant, constant:SECONDS, wire, spike or bimodal. Default none."
#: Options that describe a profile's workload.
_OF_PROFILE = ("graph", "stages", "microbatches", "images", "sounds", "skip", "split", "latency", "seed", "save_costs")


def check_source(named: Collection[str]) -> None:
    """Refuse a cost file beside the options of a profile, and neither of the two."""
    from rrfp.lab.sweep.experiment import RECORD_SPLIT

    with Faults() as faults:
        if ("costs" in named) == ("profile" in named):
            with faults.kept():
                raise ConfigError("exactly one of --costs FILE and --profile multimodal is needed")
        for name in _OF_PROFILE:
            if name in named and "profile" not in named:
                with faults.kept():
                    how = f"; for --costs {RECORD_SPLIT}" if name == "split" else ""
                    raise ConfigError(f"--{name.replace('_', '-')} goes with --profile multimodal{how}")
        for name in ("sizes", "tp"):
            if name in named and "costs" not in named:
                with faults.kept():
                    raise ConfigError(f"--{name} goes with --costs")


def workload_of(texts: Texts) -> MultimodalWorkload:
    """The workload of the options; None stands for one that is not given."""
    if texts["graph"] == "chain" and texts["skip"]:
        raise ConfigError("skip goes with graph branch or colocated: a chain has no way round an encoder")
    return _multimodal(**texts)


def _check_profile(text: str) -> None:
    from rrfp.lab.generators.multimodal import MULTIMODAL

    if text != MULTIMODAL:
        raise ConfigError(f"profile is {text!r}, must be {MULTIMODAL}; rrfp sweep has the profiles of chains")


def _check_graph(text: str) -> None:
    _multimodal(graph=text)


def _check_latency(text: str) -> None:
    _multimodal(latency=text)


def _check_share(name: str) -> Callable[[float | None], float | None]:
    def check(value: float | None) -> float | None:
        if value is not None:
            _multimodal(**{name: value})
        return value

    return check


def _share(name: str, what: str, default: float) -> Any:
    return typer.Option(
        f"--{name}",
        metavar="P",
        help=_SHARE.format(what, default),
        rich_help_panel=WORKLOAD,
        callback=_check_share(name),
    )


def _multimodal(**values: Any) -> MultimodalWorkload:
    """The workload of the options that are given."""
    from rrfp.lab.sweep.workloads import MultimodalWorkload

    return MultimodalWorkload(**{name: value for name, value in values.items() if value is not None})


Profile = Annotated[str | None, choice("profile", "multimodal", _PROFILE, WORKLOAD, _check_profile)]
GraphOption = Annotated[str | None, choice("graph", "chain|branch|colocated", _GRAPH, WORKLOAD, _check_graph)]
Stages = Annotated[int | None, option("stages", "N", "Stages; default 8.", WORKLOAD, least=1)]
Microbatches = Annotated[int | None, option("microbatches", "M", "Microbatches; default 32.", WORKLOAD, least=1)]
Images = Annotated[float | None, _share("images", "an image", 0.6)]
Sounds = Annotated[float | None, _share("sounds", "a sound", 0.4)]
Skip = Annotated[bool | None, typer.Option("--skip/--no-skip", help=_SKIP, rich_help_panel=WORKLOAD)]
Split = Annotated[bool | None, typer.Option("--split/--no-split", help=_SPLIT, rich_help_panel=WORKLOAD)]
Latency = Annotated[
    str | None, option("latency", "MODEL", _LATENCY, WORKLOAD, check=_check_latency, values=known_latencies)
]
Seed = Annotated[int | None, option("seed", "S", "Of the microbatches; default 0.", WORKLOAD, least=0)]
