"""The tables of the pages, from result files that commands have written and people committed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.evidence.peers import cells, finished, missed, on_another_day, twice
from benchmarks.evidence.results import (
    MARK,
    MECHANISMS,
    NOTHING,
    PAPER,
    PARITY,
    PEERS,
    PEERS_FULL_4,
    PEERS_FULL_8,
    block,
    markdown,
    read,
)
from benchmarks.mechanisms.settings import BF, BFW, BLOCKING, WORST
from benchmarks.paper.claims import (
    BOTTLENECK,
    COMPUTE_MIDDLE,
    COMPUTE_SPREAD,
    MESSAGE_MIDDLE,
    MESSAGE_SPREAD,
    SATURATION,
    TABLE_1,
    TABLE_2,
    TABLE_3,
    TABLE_4,
    TABLE_5,
    TABLE_6,
    TABLE_7,
    Family,
)
from benchmarks.parity.settings import ONE_PROCESS


def _simulated(name: str) -> Callable[[Path], str]:
    """A table of benchmarks/paper as it is."""

    def table(document: Any) -> Iterator[str]:
        found = document["tables"][name]
        yield from markdown(found["columns"], found["rows"])

    return block(PAPER, table)


# The claims, one line each.


def _claims(root: Path) -> str:
    """What the paper claims, what the simulator says, and what real processes did."""
    paper, parity, mechanisms, peers = (read(root, name) for name in (PAPER, PARITY, MECHANISMS, PEERS))
    rows = [
        *_speedups(paper, mechanisms),
        _external(peers),
        *_jitter(paper, peers),
        _hint(paper, mechanisms),
        _coordination(paper, mechanisms),
        *_statistics(paper, mechanisms),
        _bottleneck(paper),
        _saturation(paper),
        _scaling(paper),
        _losses(parity),
    ]
    return "\n".join(markdown(("claim", "paper", "simulated", "real processes"), rows))


def _speedups(paper: Any, mechanisms: Any) -> Iterator[tuple[str, ...]]:
    names: Mapping[Family, str] = {"llm": "language", "mllm": "multimodal"}
    for family, name in names.items():
        pairs = [
            (setting, row)
            for table, settings in (("table-1", TABLE_1), ("table-2", TABLE_2))
            for setting, row in zip(settings, paper["tables"][table]["data"] if paper else settings, strict=True)
            if setting.family == family
        ]
        theirs = max(setting.speedups[2] for setting, _ in pairs)
        ours = f"{max(row['over_blocking']['bfw'] for _, row in pairs):.2f}x" if paper else NOTHING
        jitter = "J0" if family == "llm" else "J3"
        ratio = _ratio(mechanisms, f"PP 8, {family}, {jitter}", BFW, BLOCKING)
        real = NOTHING if ratio is None else f"{1 / ratio:.2f}x at PP 8, {jitter}, messages within one host"
        yield f"BFW over 1F1B, {name}, at most", f"{theirs:.2f}x", ours, real


def _ratio(mechanisms: Any, cell: str, method: str, base: str) -> float | None:
    rows = mechanisms["rows"] if mechanisms else ()
    found = [row["ratio"] for row in rows if (row["cell"], row["method"], row["base"]) == (cell, method, base)]
    return found[0] if found else None


def _external(peers: Any) -> tuple[str, ...]:
    paper = f"{TABLE_4[0]:.2f}-{TABLE_4[1]:.2f}x, {TABLE_5[0]:.2f}-{TABLE_5[1]:.2f}x"
    over = [cell["over"].get("DeepSpeed 1F1B") for cell in peers["cells"] if cell["method"] == BF] if peers else []
    gains = sorted(1 / each["value"] for each in over if each)
    real = f"{gains[0]:.2f}-{gains[-1]:.2f}x over DeepSpeed" if gains else NOTHING
    return "BF over the faster of DeepSpeed and Cornstarch", paper, NOTHING, real


def _jitter(paper: Any, peers: Any) -> Iterator[tuple[str, ...]]:
    data = {row["level"]: row for row in paper["tables"]["table-6"]["data"]} if paper else {}
    seconds = {
        (cell["method"], cell["jitter"]): cell["ms"]
        for cell in (peers["cells"] if peers else ())
        if (cell["stages"], cell["profile"]) == (8, "mllm")
    }
    for place, (name, simulated, method) in enumerate((("1F1B", "eager", "strict 1f1b"), ("BF", "bf", BF))):
        ours = f"{data['J3'][simulated]:.1f}%" if data else NOTHING
        both = [seconds.get((method, level)) for level in ("J3", "J0")]
        real = f"{100 * (both[0] / both[1] - 1):.1f}%" if both[0] and both[1] else NOTHING
        yield f"slowdown by jitter J3, {name}", f"{TABLE_6['J3'][place]:.1f}%", ours, real


def _hint(paper: Any, mechanisms: Any) -> tuple[str, ...]:
    data = {row["hint"]: row["ours"] for row in paper["tables"]["table-7"]["data"]} if paper else {}
    ratio = _ratio(mechanisms, "PP 8, mllm, J3", WORST, BF)
    real = NOTHING if ratio is None else f"{100 * (ratio - 1):+.1f}%"
    ours = f"{data['f-priority']:+.1f}%" if data else NOTHING
    return "F-priority over BF", f"{TABLE_7['f-priority']:+.1f}%", ours, real


def _coordination(paper: Any, mechanisms: Any) -> tuple[str, ...]:
    data = paper["tables"]["table-3"]["data"] if paper else ()
    shares = {row["method"]: row["ours"][3] for row in data if row["tp"] == 2}
    ours = f"{shares['BF, agreement']:.2%}, by a leader {shares['BF, leader']:.2%}" if shares else NOTHING
    found = {(row["cell"], row["method"]): row["share"] for row in mechanisms["tp"]} if mechanisms else {}
    cells = dict.fromkeys(cell for cell, _ in found)
    each = (f"{found[c, 'agreement']:.2%}, by a leader {found[c, 'leader, depth 2']:.2%} ({c})" for c in cells)
    real = "; ".join(each) or NOTHING
    paper_share = TABLE_3[2][1].coordination / TABLE_3[2][1].iteration
    return "coordination at TP 2, share of a step", f"{paper_share:.2%}", ours, real


def _statistics(paper: Any, mechanisms: Any) -> Iterator[tuple[str, ...]]:
    data = {row["name"]: row["ours"] for row in paper["tables"]["statistics"]["data"] if "name" in row} if paper else {}
    spreads = next((each for name, each in data.items() if "message" in name), None)
    ours = f"{spreads[0]:.2f}, {spreads[1]:.2f}" if spreads else NOTHING
    found = [row for row in mechanisms["messages"] if row["method"] == BLOCKING] if mechanisms else []
    real = "; ".join(f"{row['outer']:.2f}, {row['middle']:.2f} ({row['cell']})" for row in found) or NOTHING
    yield "messages: (p95 - p5) / p50, (p75 - p25) / p50", f"{MESSAGE_SPREAD:.2f}, {MESSAGE_MIDDLE:.2f}", ours, real
    spreads = next((each for name, each in data.items() if "compute" in name), None)
    ours = f"{spreads[0]:.2f}, {spreads[1]:.2f}" if spreads else NOTHING
    yield "compute: the same", f"{COMPUTE_SPREAD:.2f}, {COMPUTE_MIDDLE:.2f}", ours, NOTHING


def _bottleneck(paper: Any) -> tuple[str, ...]:
    data = paper["tables"]["statistics"]["data"] if paper else ()
    shares = [f"{row['last_is_slowest']:.1f}%" for row in data if "family" in row]
    theirs = ", ".join(f"{share:.1f}%" for share, _ in BOTTLENECK.values())
    return "last stage is the slowest (language, multimodal)", theirs, ", ".join(shares) or NOTHING, NOTHING


def _saturation(paper: Any) -> tuple[str, ...]:
    data = {row["limit"]: row["over_unlimited"] for row in paper["tables"]["limit"]["data"]} if paper else {}
    enough = min((limit for limit, over in data.items() if over < 1), default=None)
    ours = f"{enough} (16: {data[16]:+.1f}%)" if enough is not None else NOTHING
    return "limit beyond which a step gets no shorter", str(SATURATION), ours, NOTHING


def _scaling(paper: Any) -> tuple[str, ...]:
    found = paper["tables"]["table-8"] if paper else None
    place = found["columns"].index("reproduced") if found else 0
    verdicts = [row[place] for row in found["rows"]] if found else []
    ours = f"{verdicts.count('yes')} of {len(verdicts)}" if verdicts else NOTHING
    return "Table 8, speed-ups of which 80% are reached", "22", ours, NOTHING


def _losses(parity: Any) -> tuple[str, ...]:
    rows = [row for row in parity["rows"] if row["method"] != ONE_PROCESS] if parity else []
    fixed = [row for row in rows if row["fixes_bits"]]
    free = [row for row in rows if not row["fixes_bits"]]
    real = NOTHING
    if rows:
        spreads = [row["of_spread"] for row in free if row["of_spread"] is not None]
        same = sum(row["same_bits"] for row in fixed)
        real = f"one process's sha256 in {same} of {len(fixed)} trainings that promise it"
        if spreads:
            real += f"; others differ by at most {_percent(max(spreads))} of the difference between seeds"
    return "losses over 500 iterations", "same trend", NOTHING, real


# Tables of real processes.


def _mechanisms(document: Any) -> Iterator[str]:
    rows = document["rows"]
    for cell in dict.fromkeys(row["cell"] for row in rows):
        yield f"{cell}:"
        yield ""
        head = (
            "mechanism",
            "method",
            "beside",
            "/ bound [95%]",
            "engine",
            "/ beside [95%]",
            "engine",
            "paper",
            "held (sum)",
            "rounds",
        )
        yield from markdown(head, (_mechanism_row(row) for row in rows if row["cell"] == cell))
        yield ""


def _mechanism_row(row: Any) -> tuple[str, ...]:
    return (
        row["mechanism"].split(":")[0],
        row["method"] + (f" {MARK}" if row["is_disturbed"] else ""),
        row["base"],
        _measured(row, "per_bound"),
        f"{row['simulated_per_bound']:.3f}",
        _measured(row, "ratio"),
        f"{row['simulated']:.3f}",
        NOTHING if row["paper"] is None else f"{row['paper']:.3f}",
        f"{row['held'][0]:g} ({row['held'][1]:g})",
        str(row["rounds"]),
    )


def _measured(row: Any, name: str) -> str:
    interval = row.get(f"{name}_interval")
    return f"{row[name]:.3f}" + (f" [{interval[0]:.3f}-{interval[1]:.3f}]" if interval else "")


def _groups(document: Any) -> Iterator[str]:
    head = (
        "ranks of two a stage",
        "/ leader, depth 2 [95%]",
        "engine",
        "coordination",
        "engine",
        "paper",
        "messages a task",
    )
    yield from markdown(
        head,
        (
            (
                f"{row['cell']}: {row['method']}",
                _measured(row, "ratio"),
                f"{row['simulated']:.3f}",
                f"{row['share']:.2%}",
                f"{row['simulated_share']:.2%}",
                NOTHING if row["paper_share"] is None else f"{row['paper_share']:.2%}",
                f"{row['messages']:.1f}",
            )
            for row in document["tp"]
        ),
    )


def _messages(document: Any) -> Iterator[str]:
    head = ("times of", "p50 ms", "(p95 - p5) / p50", "(p75 - p25) / p50", "messages")
    theirs = ("the paper's 1F1B", NOTHING, f"{MESSAGE_SPREAD:.2f}", f"{MESSAGE_MIDDLE:.2f}", NOTHING)
    ours = (
        (
            f"{row['cell']}: {row['method']}",
            f"{1e3 * row['p50']:.2f}",
            f"{row['outer']:.2f}",
            f"{row['middle']:.2f}",
            f"{row['count']:,}",
        )
        for row in document["messages"]
    )
    yield from markdown(head, (theirs, *ours))


def _engine_only(document: Any) -> Iterator[str]:
    rows = document["simulated"]
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    found = {(row["method"], row["base"], row["cell"]): row["ratio"] for row in rows}
    pairs = dict.fromkeys(key[:2] for key in found)
    body = ((method, base, *(f"{found[method, base, cell]:.3f}" for cell in cells)) for method, base in pairs)
    yield from markdown(("method", "beside", *cells), body)


def _parity(document: Any) -> Iterator[str]:
    head = ("model, seed", "method", "last evaluation", "sha256", "largest", "evaluated", "of seeds")
    yield from markdown(head, map(_parity_row, document["rows"]))


def _parity_row(row: Any) -> tuple[str, ...]:
    digest = row["sha256"][:12]
    own = "one process's" if row["same_bits"] and row["method"] != ONE_PROCESS else digest
    return (
        f"{row['model']}, {row['seed']}",
        row["method"],
        f"{row['last']:.6f}",
        own,
        *(f"{row[name]:.1e}" if row[name] else "0" for name in ("largest", "largest_evaluated")),
        NOTHING if row["of_spread"] is None else _percent(row["of_spread"]),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share else "0"


#: By the name in the page.
BLOCKS: Mapping[str, Callable[[Path], str]] = {
    "claims": _claims,
    **{
        name: _simulated(name)
        for name in (
            "table-1",
            "table-2",
            "table-3",
            "tables-4-5",
            "table-6",
            "table-7",
            "table-8",
            "limit",
            "statistics",
        )
    },
    "peers": block(PEERS, cells),
    "peers-missed": missed,
    "peers-twice": twice,
    "peers-another-day": on_another_day,
    "peers-full-8": block(PEERS_FULL_8, finished),
    "peers-full-4": block(PEERS_FULL_4, finished),
    "mechanisms": block(MECHANISMS, _mechanisms),
    "mechanisms-tp": block(MECHANISMS, _groups),
    "messages": block(MECHANISMS, _messages),
    "mechanisms-simulated": block(MECHANISMS, _engine_only),
    "parity": block(PARITY, _parity),
}
