"""Cost files whose timelines were worked out by hand, one time unit a cell.

A chart has a line a stage and a cell a unit: ``F0`` the forward of microbatch 0 on the first chunk, ``F0'`` on the
second, ``--`` an idle lane. The makespan is the number of cells.
"""

from __future__ import annotations

from typing import Any

import pytest

from rrfp.costs import from_json
from rrfp.engine.record import EngineResult
from rrfp.lab.simulation import simulate


def chart_of(result: EngineResult, stages: int) -> str:
    """The run as a chart."""
    lines = []
    for spans in result.spans:
        cells = ["--"] * int(result.makespan)
        for span in spans:
            chunk = span.task.virtual_stage // stages
            for unit in range(int(span.start), int(span.end)):
                cells[unit] = f"{span.task.kind}{span.task.microbatch}" + "'" * chunk
        lines.append(" ".join(cells))
    return "\n".join(lines)


#: Two stages, three microbatches, F = 1, B = 2.
THREE = """
{"stages": 2, "chunks": 1, "placement": "looped", "microbatches": 3,
 "F": [[1, 1, 1], [1, 1, 1]], "B": [[2, 2, 2], [2, 2, 2]],
 "latency_F": [[0, 0, 0]], "latency_B": [[0, 0, 0]]}
"""
#: The same with two microbatches.
TWO = """
{"stages": 2, "chunks": 1, "placement": "looped", "microbatches": 2,
 "F": [[1, 1], [1, 1]], "B": [[2, 2], [2, 2]],
 "latency_F": [[0, 0]], "latency_B": [[0, 0]]}
"""
#: Backward split in halves.
TWO_SPLIT = """
{"stages": 2, "chunks": 1, "placement": "looped", "microbatches": 2,
 "F": [[1, 1], [1, 1]], "B": [[1, 1], [1, 1]],
 "W": [[1, 1], [1, 1]],
 "latency_F": [[0, 0]], "latency_B": [[0, 0]]}
"""
#: The same with three microbatches.
THREE_SPLIT = """
{"stages": 2, "chunks": 1, "placement": "looped", "microbatches": 3,
 "F": [[1, 1, 1], [1, 1, 1]], "B": [[1, 1, 1], [1, 1, 1]],
 "W": [[1, 1, 1], [1, 1, 1]],
 "latency_F": [[0, 0, 0]], "latency_B": [[0, 0, 0]]}
"""
#: Two stages of two chunks, all times 1.
LOOPED = """
{"stages": 2, "chunks": 2, "placement": "looped", "microbatches": 2,
 "F": [[1, 1], [1, 1], [1, 1], [1, 1]], "B": [[1, 1], [1, 1], [1, 1], [1, 1]],
 "latency_F": [[0, 0], [0, 0], [0, 0]], "latency_B": [[0, 0], [0, 0], [0, 0]]}
"""
#: The same in V placement.
V = """
{"stages": 2, "chunks": 2, "placement": "v", "microbatches": 2,
 "F": [[1, 1], [1, 1], [1, 1], [1, 1]], "B": [[1, 1], [1, 1], [1, 1], [1, 1]],
 "latency_F": [[0, 0], [0, 0], [0, 0]], "latency_B": [[0, 0], [0, 0], [0, 0]]}
"""
#: The same with W = 1.
V_SPLIT = """
{"stages": 2, "chunks": 2, "placement": "v", "microbatches": 2,
 "F": [[1, 1], [1, 1], [1, 1], [1, 1]], "B": [[1, 1], [1, 1], [1, 1], [1, 1]],
 "W": [[1, 1], [1, 1], [1, 1], [1, 1]],
 "latency_F": [[0, 0], [0, 0], [0, 0]], "latency_B": [[0, 0], [0, 0], [0, 0]]}
"""
#: Forwards travel for 2, backwards for 1.
SLOW_LINKS = """
{"stages": 2, "chunks": 1, "placement": "looped", "microbatches": 2,
 "F": [[1, 1], [1, 1]], "B": [[1, 1], [1, 1]],
 "latency_F": [[2, 2]], "latency_B": [[1, 1]]}
"""
#: The forward of microbatch 0 is 5 on the way, the others 1; backwards arrive at once.
LATE_FIRST = """
{"stages": 2, "chunks": 1, "placement": "looped", "microbatches": 3,
 "F": [[1, 1, 1], [1, 1, 1]], "B": [[1, 1, 1], [1, 1, 1]],
 "latency_F": [[5, 1, 1]], "latency_B": [[0, 0, 0]]}
"""
#: Every task has a time of its own.
UNEVEN = """
{"stages": 2, "chunks": 1, "placement": "looped", "microbatches": 3,
 "F": [[1, 3, 1], [2, 1, 1]], "B": [[1, 1, 2], [2, 1, 3]],
 "latency_F": [[0, 0, 0]], "latency_B": [[0, 0, 0]]}
"""
#: Three stages, three microbatches, all times 1.
THREE_STAGES = """
{"stages": 3, "chunks": 1, "placement": "looped", "microbatches": 3,
 "F": [[1, 1, 1], [1, 1, 1], [1, 1, 1]], "B": [[1, 1, 1], [1, 1, 1], [1, 1, 1]],
 "latency_F": [[0, 0, 0], [0, 0, 0]], "latency_B": [[0, 0, 0], [0, 0, 0]]}
"""

HINTS = {
    # Stage 1 is never without work from 1 on: 1 + 3 x (1 + 2), and the last backward on stage 0: + 2 = 12.
    "bf": (
        THREE,
        {"hint": "bf"},
        """
        F0 F1 F2 -- B0 B0 -- B1 B1 -- B2 B2
        -- F0 B0 B0 F1 B1 B1 F2 B2 B2 -- --
        """,
    ),
    # One microbatch at a time: 2 x (1 + 1 + 2 + 2) = 12.
    "bf, limit 1": (
        TWO,
        {"hint": "bf", "limit": 1},
        """
        F0 -- -- -- B0 B0 F1 -- -- -- B1 B1
        -- F0 B0 B0 -- -- -- F1 B1 B1 -- --
        """,
    ),
    # Stage 0 holds 2, stage 1 holds 1. At 2 stage 0 is full until B0 is back; stage 1 works from 1 to 10: 12 as above.
    "bf, limit 1f1b": (
        THREE,
        {"hint": "bf", "limit": "1f1b"},
        """
        F0 F1 -- -- B0 B0 F2 B1 B1 -- B2 B2
        -- F0 B0 B0 F1 B1 B1 F2 B2 B2 -- --
        """,
    ),
    # B0 is back on stage 0 at 3, a whole F0, F0, B0 path; W fills while B1 is awaited: 3 tasks x 2, and 1 idle = 7.
    "bfw": (
        TWO_SPLIT,
        {"hint": "bfw"},
        """
        F0 F1 -- B0 W0 B1 W1
        -- F0 B0 F1 B1 W0 W1
        """,
    ),
    # The same work unsplit: 1 + 2 x 3 on stage 1, then B1 on stage 0: + 2 = 9, two more than split.
    "bfw, unsplit": (
        TWO,
        {"hint": "bfw"},
        """
        F0 F1 -- -- B0 B0 -- B1 B1
        -- F0 B0 B0 F1 B1 B1 -- --
        """,
    ),
    # One microbatch at a time, its slot held until W: stage 0 has none free before 5. 2 x 5 = 10.
    "bfw, limit 1": (
        TWO_SPLIT,
        {"hint": "bfw", "limit": 1},
        """
        F0 -- -- B0 W0 F1 -- -- B1 W1
        -- F0 B0 W0 -- -- F1 B1 W1 --
        """,
    ),
    # Deeper forward first: at 3 stage 1 takes F0', not F1' (still on stage 0). Stage 1 works from 1 to 9, then B1: 10.
    "bf, looped": (
        LOOPED,
        {"hint": "bf"},
        """
        F0 F1 F0' F1' -- B0' -- B1' B0 B1
        -- F0 F1 F0' B0' F1' B1' B0 B1 --
        """,
    ),
    # K = 1 is two slots, and the staircase keeps the second for the deeper chunk: F1 waits for B0 on the first. 2 x 8.
    "bf, looped, limit 1": (
        LOOPED,
        {"hint": "bf", "limit": 1},
        """
        F0 -- F0' -- -- B0' -- B0 F1 -- F1' -- -- B1' -- B1
        -- F0 -- F0' B0' -- B0 -- -- F1 -- F1' B1' -- B1 --
        """,
    ),
    # The V: F0 goes on to the second chunk of stage 1 at once (deeper first), and the loss is on stage 0 at 4.
    "bf, V": (
        V,
        {"hint": "bf"},
        """
        F0 F1 -- F0' B0' F1' B1' B0 -- B1
        -- F0 F0' F1 F1' B0' B0 B1' B1 --
        """,
    ),
    # F0 0-1, there at 3; B0 4-5, back at 6. F1 there at 4, runs 5-6, B1 6-7, back at 8, 8-9.
    "bf, latency": (
        SLOW_LINKS,
        {"hint": "bf"},
        """
        F0 F1 -- -- -- -- B0 -- B1
        -- -- -- F0 B0 F1 B1 -- --
        """,
    ),
    # F0 is there at 6, F1 at 3, F2 at 4: what is ready runs, and F0 is last (at 6 backward has the turn).
    "bf, late first": (
        LATE_FIRST,
        {"hint": "bf"},
        """
        F0 F1 F2 -- -- B1 -- B2 -- B0
        -- -- -- F1 B1 F2 B2 F0 B0 --
        """,
    ),
    # Stage 1 works from 1 without a pause: 1 + (2 + 2) + (1 + 1) + (1 + 3) = 11, and B2 on stage 0: + 2 = 13.
    "bf, uneven": (
        UNEVEN,
        {"hint": "bf"},
        """
        F0 F1 F1 F1 F2 B0 -- B1 -- -- -- B2 B2
        -- F0 F0 B0 B0 F1 B1 F2 B2 B2 B2 -- --
        """,
    ),
}

SCHEDULES = {
    # (M + N - 1) x (F + B) = 3 x 3.
    "gpipe": (
        TWO,
        {"strict": "gpipe"},
        """
        F0 F1 -- -- -- B0 B0 B1 B1
        -- F0 F1 B0 B0 B1 B1 -- --
        """,
    ),
    # (M + N - 1) x (F + B) = 5 x 2.
    "1f1b": (
        THREE_STAGES,
        {"strict": "1f1b"},
        """
        F0 F1 F2 -- -- B0 -- B1 -- B2
        -- F0 F1 -- B0 F2 B1 -- B2 --
        -- -- F0 B0 F1 B1 F2 B2 -- --
        """,
    ),
    # All of stage 1 waits for F0 until 6, four units more than BF loses: F2 leaves stage 0 at 10 only, is there at 11.
    "1f1b, late first": (
        LATE_FIRST,
        {"strict": "1f1b"},
        """
        F0 F1 -- -- -- -- -- -- B0 F2 B1 -- -- B2
        -- -- -- -- -- -- F0 B0 F1 B1 -- F2 B2 --
        """,
    ),
    # An unsplit schedule on split costs, B's output leaving at its end: 3 M + 2 (N - 1) = 11.
    "1f1b, split": (
        THREE_SPLIT,
        {"strict": "1f1b"},
        """
        F0 F1 -- B0 W0 F2 B1 W1 -- B2 W2
        -- F0 B0 W0 F1 B1 W1 F2 B2 W2 --
        """,
    ),
    # Stage 1 runs W0 after B1, and one W at the end where it would idle: 3 M + (N - 1) (F + B - W) = 10.
    "zb-h1": (
        THREE_SPLIT,
        {"strict": "zb-h1"},
        """
        F0 F1 -- B0 W0 F2 B1 W1 B2 W2
        -- F0 B0 F1 B1 W0 F2 B2 W1 W2
        """,
    ),
    # 2 M C + (N - 1) (F + B) / C, F and B of a stage being 2: 8 + 2 = 10.
    "interleaved-1f1b": (
        LOOPED,
        {"strict": "interleaved-1f1b"},
        """
        F0 F1 F0' F1' -- B0' -- B1' B0 B1
        -- F0 F1 F0' B0' F1' B1' B0 B1 --
        """,
    ),
    # M = 2 is one fewer than the 2 N - 1 at which no unit inside is lost: stage 0 waits at 11 for B1. 6 M + N - 1 + 1.
    "zb-v": (
        V_SPLIT,
        {"strict": "zb-v"},
        """
        F0 F1 -- F0' B0' W0' F1' B1' W1' B0 W0 -- B1 W1
        -- F0 F0' F1 F1' B0' W0' B0 W0 B1' W1' B1 W1 --
        """,
    ),
    # Stage 0 has F0 F1 B0 F2 B1 B2: F1 1-4, B0 at 5; stage 1 F0 1-3, B0 3-5, F1 5-6, B1 6-7; F2 6-7 there, B1 7-8;
    # stage 1 F2 7-8, B2 8-11; B2 on stage 0 11-13.
    "1f1b, uneven": (
        UNEVEN,
        {"strict": "1f1b"},
        """
        F0 F1 F1 F1 -- B0 F2 B1 -- -- -- B2 B2
        -- F0 F0 B0 B0 F1 B1 F2 B2 B2 B2 -- --
        """,
    ),
}


@pytest.mark.parametrize(("text", "method", "chart"), [*HINTS.values(), *SCHEDULES.values()], ids=[*HINTS, *SCHEDULES])
def test_the_timeline_is_the_one_worked_out_by_hand(text: str, method: dict[str, Any], chart: str) -> None:
    lines = [line.strip() for line in chart.strip().splitlines()]
    costs = from_json(text)
    simulation = simulate(costs, **method)
    assert chart_of(simulation.result, costs.stages) == "\n".join(lines)
    assert {simulation.makespan} == {len(line.split()) for line in lines}
