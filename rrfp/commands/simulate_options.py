"""The options of `rrfp simulate`: their help, and from their texts to the runs that they ask for.

Everything that is wrong with a value by itself is told here, before anything runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from rrfp.commands.naming import named_or_loaded_hint
from rrfp.errors import ConfigError

if TYPE_CHECKING:
    from rrfp.costs.table import CostTable
    from rrfp.sim.sweep.experiment import Cell, Method, Workload

_METHOD, _WORKLOAD, _OUTPUT, _SWEEP = "Method", "Workload", "Output", "Several runs (lists, seeds)"


def _option(name: str, metavar: str, help: str, panel: str, least: int | None = None) -> Any:
    return typer.Option(f"--{name}", metavar=metavar, help=help, rich_help_panel=panel, min=least)


_HINT = "Dispatch by this hint: a name of `rrfp hints`, or module:attribute."
_STRICT = "Run this schedule to the letter: a name that `rrfp hints` lists as a schedule."
_LIMIT = "Microbatches a stage may hold: a number, 1f1b (N - i on stage i), n or 2n. With --hint only; default 2n."
_ADMISSION = "How chunks share the limit's slots. With --hint only; default staircase."
_SENDS = "blocking: 1f1b sends as Megatron does, sender and receiver wait for each other. With --strict only."
_SIZES = "Tell hints how large each microbatch is: a JSON list of M numbers, or planned, the file's own sums of times."
_SPLIT = "Split backward into input gradient and weight gradient; bfw on whole backwards is bf."
_LATENCY = "none, constant, constant:SECONDS, wire or spike."
_TP = "Ranks of a tensor-parallel group: each stage is T ranks, whose messages take times of their own."
_COORDINATION = "How ranks of a group come to one order. With --tp and --hint only; default leader."
_SEEDS = "Run this many seeds, from --seed on, and show mean and spread."

Costs = Annotated[Path | None, _option("costs", "FILE", "Cost file (JSON); --profile makes one instead.", _WORKLOAD)]
Profile = Annotated[str | None, _option("profile", "llm|mllm", "A named, seeded workload.", _WORKLOAD)]
Stages = Annotated[str | None, _option("stages", "N", "Stages; default 8.", _WORKLOAD)]
Microbatches = Annotated[str | None, _option("microbatches", "M", "Microbatches; default 64.", _WORKLOAD)]
Chunks = Annotated[str | None, _option("chunks", "C", "Chunks a stage; default 1.", _WORKLOAD)]
Placement = Annotated[str | None, _option("placement", "looped|v", "Where chunks live; default looped.", _WORKLOAD)]
Split = Annotated[bool | None, typer.Option("--split/--no-split", help=_SPLIT, rich_help_panel=_WORKLOAD)]
Jitter = Annotated[str | None, _option("jitter", "J0..J3", "How much tasks are delayed; default J0.", _WORKLOAD)]
Latency = Annotated[str | None, _option("latency", "MODEL", _LATENCY + " Default none.", _WORKLOAD)]
Seed = Annotated[int | None, _option("seed", "S", "Default 0.", _WORKLOAD, 0)]
Tp = Annotated[int | None, _option("tp", "T", _TP, _WORKLOAD, 1)]
Sizes = Annotated[str | None, _option("sizes", "FILE|planned", _SIZES, _WORKLOAD)]
HintName = Annotated[str | None, _option("hint", "NAME", _HINT, _METHOD)]
Strict = Annotated[str | None, _option("strict", "NAME", _STRICT, _METHOD)]
LimitText = Annotated[str | None, _option("limit", "K|1f1b|n|2n", _LIMIT, _METHOD)]
Admission = Annotated[str | None, _option("admission", "staircase|paper", _ADMISSION, _METHOD)]
Sends = Annotated[str | None, _option("sends", "eager|blocking", _SENDS, _METHOD)]
CoordinationName = Annotated[str | None, _option("coordination", "leader|agreement", _COORDINATION, _METHOD)]
Seeds = Annotated[int | None, _option("seeds", "K", _SEEDS, _SWEEP, 1)]
Csv = Annotated[Path | None, _option("csv", "FILE.csv", "Write a row a run.", _SWEEP)]
Png = Annotated[Path | None, _option("png", "FILE.png", "Draw speed and memory of all runs.", _SWEEP)]
Jobs = Annotated[int | None, _option("jobs", "P", "Processes; default: usable cores.", _SWEEP, 1)]
Timeline = Annotated[Path | None, _option("timeline", "FILE.png", "Draw the step's timeline (one run).", _OUTPUT)]
Trace = Annotated[Path | None, _option("trace", "FILE.json", "Write a trace for Perfetto (one run).", _OUTPUT)]

#: Option -> what was written, None where nothing was.
Texts: TypeAlias = Mapping[str, Any]

_ONE_METHOD = "exactly one of --hint NAME and --strict NAME is needed (names: rrfp hints)"
_DEFAULTS = {
    "stages": "8",
    "microbatches": "64",
    "chunks": "1",
    "placement": "looped",
    "jitter": "J0",
    "latency": "none",
}
_NUMBERS = ("stages", "microbatches", "chunks")


def check_source(costs: Path | None, others: Texts) -> None:
    """Refuse a cost file beside what goes with a profile, and neither of the two.

    Args:
        costs: the cost file.
        others: profile, and every option that goes with it.

    Raises:
        ConfigError: naming the option that is too much or missing.
    """
    if (costs is None) == (others["profile"] is None):
        raise ConfigError("exactly one of --costs FILE and --profile NAME is needed (profiles: llm, mllm)")
    for option, value in others.items():
        if costs is not None and value is not None:
            raise ConfigError(f"--{option} goes with --profile; a cost file is one workload by itself")


def cells_of(workload: Texts, methods: Texts) -> list[Cell]:
    """Every method on every workload and seed; the methods of one workload follow each other.

    Args:
        workload: values of profile, stages, microbatches, chunks, placement, split, jitter, latency, seed and seeds.
        methods: values of hint, strict, limit, admission and sends.

    Raises:
        ConfigError: for a value that is not allowed, or one that goes with nothing.
    """
    from rrfp.sim.sweep.experiment import Cell

    found = methods_of(methods)
    return [Cell(one, method) for one in _workloads_of(workload) for method in found]


def _workloads_of(texts: Texts) -> list[Workload]:
    """Every combination of the listed values, seeds innermost."""
    from rrfp.costs.streams import whole
    from rrfp.sim.sweep.experiment import Workload

    lists: dict[str, list[Any]] = {
        option: _listed(option, texts[option], default) for option, default in {"profile": "", **_DEFAULTS}.items()
    }
    for option in _NUMBERS:
        lists[option] = [whole(option, _number(text), 1) for text in lists[option]]
    lists["split"] = [bool(texts["split"])]
    first = texts["seed"] or 0
    lists["seed"] = list(range(first, first + (texts["seeds"] or 1)))
    return [Workload(**dict(zip(lists, values, strict=True))) for values in product(*lists.values())]


def methods_of(texts: Texts) -> list[Method]:
    """Every hint with every limit and admission rule, then every strict schedule with every way to send.

    Args:
        texts: values of hint, strict, limit, admission and sends.

    Raises:
        ConfigError: for a value that is not allowed, or one that goes with nothing.
    """
    from rrfp.sim.simulation import DEFAULT_LIMIT
    from rrfp.sim.sweep.experiment import Method

    if texts["hint"] is None and texts["strict"] is None:
        raise ConfigError("at least one of --hint NAME and --strict NAME is needed (names: rrfp hints)")
    for option in ("limit", "admission"):
        if texts["hint"] is None and texts[option] is not None:
            raise ConfigError(f"--{option} goes with --hint; a strict schedule holds what its order holds")
    if texts["strict"] is None and texts["sends"] is not None:
        raise ConfigError("--sends goes with --strict; readiness-driven stages never wait to send")
    methods = []
    limits = _listed("limit", texts["limit"], DEFAULT_LIMIT)
    admissions: list[Any] = _listed("admission", texts["admission"], "staircase")
    for name in [] if texts["hint"] is None else _listed("hint", texts["hint"]):
        policy = named_or_loaded_hint(name)
        methods += [
            Method(hint=policy, name=name, limit=limit, admission=rule) for limit, rule in product(limits, admissions)
        ]
    sends: list[Any] = _listed("sends", texts["sends"], "eager")
    for name in [] if texts["strict"] is None else _listed("strict", texts["strict"]):
        methods += [Method(strict=name, sends=how) for how in sends]
    return methods


def one_method(texts: Texts) -> Method:
    """The method to run on a cost file.

    Raises:
        ConfigError: as `methods_of`, and unless there is exactly one.
    """
    if (texts["hint"] is None) == (texts["strict"] is None):
        raise ConfigError(_ONE_METHOD)
    methods = methods_of(texts)
    if len(methods) > 1:
        raise ConfigError(f"a cost file runs one method, these are {len(methods)}: lists go with --profile")
    return methods[0]


def sizes_for(costs: CostTable, text: str | None) -> list[float] | None:
    """What ``--sizes`` asks for: nothing, the table's own sums, or a file's numbers.

    Raises:
        ConfigError: if the file is not a JSON list of M numbers.
    """
    from rrfp.sim.simulation import planned_sizes

    if text is None:
        return None
    if text == "planned":
        return planned_sizes(costs)
    try:
        sizes = json.loads(Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"sizes is {text!r}, must be planned or a file ({error.strerror or error})") from None
    except ValueError as error:  # not UTF-8, not JSON
        raise ConfigError(f"sizes: {text}: is not JSON ({error})") from None
    what = f"{costs.microbatches} finite numbers >= 0, one a microbatch"
    if not isinstance(sizes, list) or len(sizes) != costs.microbatches or not all(map(_is_size, sizes)):
        raise ConfigError(f"sizes: {text}: must be a list of {what}")
    return sizes


def _is_size(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]


def _listed(option: str, text: str | None, default: str = "") -> list[str]:
    """The values between commas; none twice, or a row of the sweep would count double."""
    values = [value.strip() for value in (default if text is None else text).split(",")]
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"{option} is {text!r}, must name {value!r} once")
    return values


def _number(text: str) -> int | str:
    """A whole number where the text is one; what else it is, is told by whoever checks it."""
    try:
        return int(text)
    except ValueError:
        return text
