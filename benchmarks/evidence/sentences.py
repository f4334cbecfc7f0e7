"""The figures in sentences, each from a result file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean

from benchmarks.dispatch.arrivals import STARTED
from benchmarks.evidence.results import DISPATCH, HINTS, PEERS, PEERS_FULL_8, REPLICAS, read
from benchmarks.paper.claims import TABLE_1, TABLE_2


def _percent(values: Iterable[float], digits: int = 0) -> str:
    """The range of ``values``, which are shares."""
    low, high = (f"{100 * value:.{digits}f}" for value in _ends(values))
    return f"{low}%" if low == high else f"{low} to {high}%"


def _ends(values: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[0], ordered[-1]


def less(root: Path, method: str, peer: str, profile: str) -> str | None:
    """By how much less time a step takes than a peer's, over the cells of a profile at PP 8."""
    names = [name for name in (PEERS, PEERS_FULL_8) if read(root, name) is not None]
    for name in names:
        found = [
            1 - cell["over"][peer]["value"]
            for cell in read(root, name)["cells"]
            if (cell["method"], cell["profile"], cell["stages"]) == (method, profile, 8)
        ]
        if found:
            return _percent(found)
    if names:
        raise KeyError(f"{' and '.join(names)}: no cell of {method}, {profile}")
    return None


def overhead(root: Path, method: str) -> str | None:
    """What a step takes over its own order in the engine, over all cells at PP 8."""
    document = read(root, PEERS)
    if document is None:
        return None
    return _percent((c["over_executed_order"] - 1 for c in document["cells"] if c["method"] == method), 1)


def above(root: Path, method: str, limit: str, profile: str, jitter: str) -> str | None:
    """Of the studies of hints: above the bound, mean over all PP and seeds."""
    document = read(root, HINTS)
    if document is None:
        return None
    wanted = {"method": method, "limit": limit, "profile": profile, "jitter": jitter}
    found = [cell for cell in document["cells"] if all(cell[name] == value for name, value in wanted.items())]
    return f"{fmean(cell['above']['mean'] for cell in found):.1f}%"


def slowed(root: Path, way: str, kind: str, factor: str) -> str | None:
    """Of the simulated replicas: how much longer a step takes where a rank is so much slower."""
    return _replicas(root, way, kind, factor, 1)


def gained(root: Path, way: str, kind: str) -> str | None:
    """How much shorter it is with equal ranks."""
    return _replicas(root, way, kind, "1", -1)


def _replicas(root: Path, way: str, kind: str, factor: str, sign: int) -> str | None:
    document = read(root, REPLICAS)
    if document is None:
        return None
    wanted = kind, float(factor)
    rows = [row for row in document["rows"] if (row["kind"], row["factor"]) == wanted and row.get("slow", 1) < 2]
    return _percent(sign * (row[way] - 1) for row in rows)


def started(root: Path) -> str | None:
    """From a message's sending to the start of its task on an idle lane over shm, half and nine in ten of them."""
    document = read(root, DISPATCH)
    if document is None:
        return None
    spread = document["arrivals"][STARTED]
    return f"{1e3 * spread['p50']:.2f} ms, nine in ten at most {1e3 * spread['p90']:.2f} ms,"


def paper(root: Path, family: str) -> str:
    """The largest speed-up over 1F1B that the paper has."""
    return f"{max(each.speedups[2] for each in (*TABLE_1, *TABLE_2) if each.family == family):.2f}x"


#: By the name in the page; each is given the root and what follows its name, and returns None without a result file.
FIGURES: Mapping[str, Callable[..., str | None]] = {
    figure.__name__: figure for figure in (less, overhead, above, slowed, gained, started, paper)
}
