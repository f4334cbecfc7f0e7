"""The figures of the pages about evidence are those of the committed result files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.evidence.blocks import BLOCKS
from benchmarks.evidence.page import PAGES, ROOT, differing, filled
from benchmarks.evidence.results import (
    COMMANDS,
    DISPATCH,
    HINTS,
    MECHANISMS,
    PARITY,
    PEERS,
    PEERS_AGAIN,
    PEERS_FULL_8,
    PEERS_ON_ANOTHER_DAY,
    REPLICAS,
)
from benchmarks.evidence.sentences import less
from benchmarks.mechanisms.settings import Settings
from benchmarks.shared.comparison import Cell, Turn
from benchmarks.shared.figures import median_interval
from benchmarks.shared.steps import DISTURBED_CORES
from rrfp.engine.bound import lower_bound


def write(root: Path, name: str, document: Any) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def over_torch(profile: str, jitter: str, ratio: float) -> dict[str, Any]:
    cell = {"method": "2n", "stages": 8, "profile": profile, "jitter": jitter}
    return {**cell, "over": {"torch 1F1B": {"value": ratio}}}


def measured(method: str, per_bound: float, **over: tuple[float, float]) -> dict[str, Any]:
    """A row of PP 8, llm, J3, 2% either way; ``over`` has values and what orders give, by the peer's last word."""
    names = {"torch 1F1B" if peer == "f1b" else "torch ZBV": pair for peer, pair in over.items()}
    return {
        **{"method": method, "stages": 8, "profile": "llm", "jitter": "J3", "disturbed": False, "steps": 5},
        **{"ms": 1000.0 * per_bound, "over_bound": per_bound, "low": per_bound * 0.98, "high": per_bound * 1.02},
        **{"over_executed_order": 1.05, "over_executed_low": 1.04, "over_executed_high": 1.06},
        **{"engine_over_bound": 1.0, "cpu_ms_task": 1.0, "end_ms": 1.5},
        **{"held_microbatches": 8, "held_microbatches_sum": 36, "held_bytes": 1 << 20, "held_bytes_sum": 1 << 22},
        "over": {
            name: {"value": value, "low": value * 0.98, "high": value * 1.02, "engine": alone}
            for name, (value, alone) in names.items()
        },
    }


def run_of(*cells: dict[str, Any], aims: tuple[dict[str, Any], ...] = (), **settings: Any) -> dict[str, Any]:
    return {"settings": {"microbatches": 32, "cores": 2, **settings}, "cells": list(cells), "aims": list(aims)}


def aim(name: str, value: float, limit: float, unit: str) -> dict[str, Any]:
    return {"name": f"{name}, PP 8, llm, J3", "value": value, "limit": limit, "unit": unit, "met": value <= limit}


def test_pages_have_the_figures_of_the_result_files() -> None:
    assert [page.name for page, _ in differing()] == []  # python -m benchmarks.evidence.page


def test_every_table_is_on_the_page() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert sorted(name for text in texts for name in re.findall(r"<!-- figures: ([\w-]+) -->", text)) == sorted(BLOCKS)
    assert sum(text.count("<!-- end -->") for text in texts) == len(BLOCKS)


def test_every_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    for page in PAGES:
        head = 0
        for line in page.read_text(encoding="utf-8").splitlines():
            cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
            assert not head or not cells or cells == head, line
            head = cells


def test_no_percentage_or_time_of_the_page_about_when_is_typed() -> None:
    [page] = [page for page in PAGES if page.name == "when.md"]
    typed = re.sub(r"<!--= .*?<!--/-->", "", page.read_text(encoding="utf-8"))
    figures = re.findall(r"[\d.]+(?:%| ?ms\b|x\b)", typed)
    assert set(figures) == {"5%"}  # a rule of thumb


def test_a_typed_figure_is_replaced() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| BFW over 1F1B")]
    assert len(rows) == 2
    assert filled(text.replace(rows[0], rows[0].replace("1.77x", "2.77x"))) == text


def test_without_its_result_file_a_table_names_the_command_that_writes_it(tmp_path: Path) -> None:
    for name, command in COMMANDS.items():
        assert name in command
    assert BLOCKS["parity"](tmp_path) == f"`{PARITY}` is missing: `{COMMANDS[PARITY]}` writes it."
    assert "| losses over 500 iterations | same trend | - | - |" in BLOCKS["claims"](tmp_path)


def test_a_sentence_has_the_range_over_the_cells_of_its_profile(tmp_path: Path) -> None:
    text = "takes <!--= less 2n; torch 1F1B; mllm -->1%<!--/--> less"
    assert filled(text, tmp_path) == text  # no result file
    cells = [over_torch("mllm", "J0", 0.744), over_torch("mllm", "J3", 0.69), over_torch("llm", "J0", 0.95)]
    write(tmp_path, PEERS, {"cells": cells})
    assert filled(text, tmp_path) == text.replace(">1%<", ">26 to 31%<")
    assert less(tmp_path, "2n", "torch 1F1B", "llm") == "5%"
    with pytest.raises(KeyError, match="no cell of n, mllm"):
        less(tmp_path, "n", "torch 1F1B", "mllm")
    write(tmp_path, PEERS_FULL_8, {"cells": [{**over_torch("mllm", "J0", 0.8), "method": "n"}]})
    assert less(tmp_path, "n", "torch 1F1B", "mllm") == "20%"


def test_sentences_have_figures_of_every_result_file(tmp_path: Path) -> None:
    cells = [{"method": "n", "limit": "2N", "profile": "llm", "jitter": "J3", "above": {"mean": v}} for v in (10, 11)]
    write(tmp_path, HINTS, {"cells": [*cells, {**cells[0], "jitter": "J2"}]})
    rows = [{"kind": "J0", "factor": 2.0, "dealt": dealt, "plain": 1.9} for dealt in (1.08, 1.26)]
    write(tmp_path, REPLICAS, {"rows": [*rows, {"kind": "uneven", "factor": 1.0, "dealt": 0.9}]})
    write(tmp_path, DISPATCH, {"arrivals": {"started, shm": {"p50": 0.00035, "p90": 0.00055}}})
    write(tmp_path, PEERS, {"cells": [{"method": "n", "over_executed_order": each} for each in (1.05, 1.0625)]})

    def figure(what: str) -> str:
        return filled(f"<!--= {what} -->?<!--/-->", tmp_path).removeprefix(f"<!--= {what} -->").removesuffix("<!--/-->")

    assert figure("above n; 2N; llm; J3") == "10.5%"
    assert figure("slowed dealt; J0; 2") == "8 to 26%"
    assert figure("slowed plain; J0; 2") == "90%"
    assert figure("gained dealt; uneven") == "10%"
    assert figure("started") == "0.35 ms, nine in ten at most 0.55 ms,"
    assert figure("overhead n") == "5.0 to 6.2%"
    assert figure("paper mllm") == "2.77x"


def test_a_second_run_stands_beside_the_first_and_what_is_apart_has_a_reason(tmp_path: Path) -> None:
    peers = measured("torch 1F1B", 1.2), measured("Megatron 1F1B", 1.2)
    write(tmp_path, PEERS, run_of(*peers, measured("n", 1.0, f1b=(0.83, 0.8))))
    assert BLOCKS["peers-twice"](tmp_path) == f"`{PEERS_AGAIN}` is missing: `{COMMANDS[PEERS_AGAIN]}` writes it."
    slower = measured("torch 1F1B", 1.2 * 1.1), measured("Megatron 1F1B", 1.2 * 1.1)
    write(tmp_path, PEERS_AGAIN, run_of(*slower, measured("n", 1.01, f1b=(0.765, 0.8))))

    lines = BLOCKS["peers-twice"](tmp_path).splitlines()

    assert "| PP 8, llm, J3 | 1.00 | 1.100 (1.010 to 1.100) | 1 of 3 | 0.922 (0.922 to 0.922) | 0 of 1 |" in lines
    apart = [line.split(" | ")[1:] for line in lines[lines.index("Apart:") :] if line.startswith("| PP 8")]
    assert [row[0] for row in apart] == ["torch 1F1B / bound", "Megatron 1F1B / bound", "n / torch 1F1B"]
    assert apart[0][3:] == ["0.070", "the steps of all methods took 1.100 times as long |"]
    assert apart[2][1:4] == ["0.830 [0.813-0.847]", "0.765 [0.750-0.780]", "0.033"]
    assert apart[2][4] == "n's step took 1.010 times as long, the median method's 1.100 |"


def test_of_another_day_the_cells_of_both_runs_stand_beside_each_other(tmp_path: Path) -> None:
    first = [measured("torch 1F1B", 1.2), measured("n", 1.0, f1b=(0.83, 0.8))]
    second = [{**row, "cpu_ms_task": 3 * row["cpu_ms_task"]} for row in (*first, measured("V, n", 0.9))]
    write(tmp_path, PEERS, run_of(*first, began="2026-01-02 03:04 UTC"))
    write(tmp_path, PEERS_ON_ANOTHER_DAY, run_of(*second, days=["2026-01-03", "2026-01-04"]))
    text = BLOCKS["peers-another-day"](tmp_path)
    assert "The first run began at 2026-01-02 03:04 UTC, the second on 2026-01-03 and 2026-01-04." in text
    assert "| PP 8, llm, J3 | 3.00 | 1.000 (1.000 to 1.000) | 2 of 2 | 1.000 (1.000 to 1.000) | 1 of 1 |" in text


def test_runs_within_their_intervals_have_nothing_apart(tmp_path: Path) -> None:
    run = run_of(measured("torch 1F1B", 1.2), measured("n", 1.0, f1b=(0.83, 0.8)), began="2026-01-02 03:04 UTC")
    for name in (PEERS, PEERS_AGAIN):
        write(tmp_path, name, run)
    text = BLOCKS["peers-twice"](tmp_path)
    assert "The first run began at 2026-01-02 03:04 UTC, the second at 2026-01-02 03:04 UTC." in text
    assert "| 1.00 | 1.000 (1.000 to 1.000) | 2 of 2 | 1.000 (1.000 to 1.000) | 1 of 1 |" in text
    assert "Apart" not in text


def test_a_missed_aim_has_its_reason_from_the_figures(tmp_path: Path) -> None:
    own = measured("n", 1.0, f1b=(0.83, 0.8), zbv=(0.9, 0.91))
    v = measured("V, n", 0.9, f1b=(0.8, 0.7), zbv=(0.97, 1.0))
    first = run_of(
        *(measured("torch 1F1B", 1.2), measured("torch ZBV", 1.1), own, v),
        aims=(
            aim("n, over own order, beyond the peer's", 0.4, 0, "points"),
            aim("n, CPU a task, of the peer's", 105, 100, "%"),
            aim("n, time over the peer's, of the orders' alone (tolerated)", 103.8, 103, "%"),
            aim("V, n, time, of torch ZBV's", 97, 95, "%"),
            aim("n, step end", 1.5, 2, "ms"),
        ),
    )
    write(tmp_path, PEERS, first)
    write(tmp_path, PEERS_AGAIN, {**first, "aims": [aim("n, CPU a task, of the peer's", 99, 100, "%")]})

    text = BLOCKS["peers-missed"](tmp_path)

    assert "Aims that are met: 1 of 5 and 1 of 1." in text
    assert "more processor time: 1 row." in text
    rows = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in text.splitlines() if line.startswith("| n, ")}
    assert rows["n, CPU a task, of the peer's"] == [
        *("PP 8, llm, J3", "100%", "105.00% NO", "99.00%"),
        "a step takes 0.77 s of processor time, torch ZBV's 1.54 s, for 768 tasks beside 1,536 that are shorter; "
        "its processes keep 0.77 of 2 cores busy, torch ZBV's 1.40 |",
    ]
    lost = "1.050 [1.040-1.060] of its own order, torch 1F1B 1.050 [1.040-1.060], which is 48 and 57 ms"
    assert rows["n, over own order, beyond the peer's"][4] == f"{lost}: no more time, beside a shorter order |"
    behind = rows["n, time over the peer's, of the orders' alone (tolerated)"][4]
    ratio = "over torch 1F1B 0.830 [0.813-0.847], by the orders alone 0.800"
    assert behind.startswith(f"{ratio}; beyond their own orders 48 and 57 ms; a step takes")
    [zbv] = [line for line in text.splitlines() if line.startswith("| V, n, time, of torch ZBV's")]
    assert zbv.endswith("over torch ZBV 0.970 [0.951-0.989], by the orders alone 1.000: the aim asks for more |")


def test_of_a_run_that_goes_on_the_finished_cells_and_the_missed_aims_are_shown(tmp_path: Path) -> None:
    document = run_of(
        *(measured("torch 1F1B", 1.2), measured("strict 1f1b", 1.25, f1b=(1.04, 1.0))),
        measured("n", 1.0, f1b=(0.83, 0.8)),
        aims=(
            aim("strict 1f1b, time, of that of torch 1F1B", 104, 102, "%"),
            aim("n, over own order, beyond the peer's", 1.4, 0, "points"),
            aim("n, over own order, beyond the peer's (tolerated)", 1.4, 1, "points"),
            aim("n, step end", 1.5, 2, "ms"),
        ),
        asked=16,
        days=["2026-01-02", "2026-01-03"],
    )
    write(tmp_path, PEERS_FULL_8, document)
    text = BLOCKS["peers-full-8"](tmp_path)
    said = "1 of 16 cells have all their steps, and are shown; measured on 2026-01-02, 2026-01-03."
    assert text.startswith(f"{said}\n\nPP 8, llm, J3:\n")
    assert "| torch 1F1B | 1.200 [1.176-1.224] |" in text
    assert "Aims that are met: 1 of 4." in text
    assert "| strict 1f1b, time, of that of torch 1F1B | PP 8, llm, J3 | 102% | 104.00% NO |" in text
    assert "| n, over own order, beyond the peer's (tolerated) | PP 8, llm, J3 | 1 points | 1.40 points NO |" in text
    assert "beyond the peer's |" not in text


def test_the_figures_of_mechanisms_follow_from_the_steps_in_their_file() -> None:
    document = json.loads((ROOT / MECHANISMS).read_text())
    settings, steps = Settings.from_json(json.dumps(document["settings"])), dict[tuple[str, str], dict[int, Any]]()
    for step in document["steps"]:
        cell = Cell(step["stages"], step["profile"], step["jitter"])
        bound = lower_bound(settings.reference(Turn(cell, step["round"], step["method"])), None)
        steps.setdefault((str(cell), step["method"]), {})[step["round"]] = {**step, "bound": bound}
    for row in document["rows"]:
        own, other = (steps[row["cell"], row[name]] for name in ("method", "base"))
        used = [n for n in own if max(own[n]["others"], other[n]["others"]) <= DISTURBED_CORES]
        per_bound = [own[n]["seconds"] / own[n]["bound"] for n in used]
        ratios = [own[n]["seconds"] / other[n]["seconds"] for n in used]
        assert (row["rounds"], row["is_disturbed"]) == (len(used), False)
        for name, values in (("per_bound", per_bound), ("ratio", ratios)):
            assert row[name] == pytest.approx(median(values))
            assert row[f"{name}_interval"] == pytest.approx(median_interval(values))


def test_of_losses_the_summary_counts_trainings_with_the_bits_of_one_process(tmp_path: Path) -> None:
    row = {"method": "torch 1F1B", "fixes_bits": True, "same_bits": True, "of_spread": None}
    free = {"method": "bf", "fixes_bits": False, "same_bits": False, "of_spread": 0.0123}
    write(tmp_path, PARITY, {"rows": [{**row, "method": "one process"}, row, row, free]})
    assert (
        "one process's sha256 in 2 of 2 trainings that promise it; others differ by at most 1.2% of the difference"
        in BLOCKS["claims"](tmp_path)
    )


def test_result_files_are_where_the_page_says(tmp_path: Path) -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    assert all(name in text for name in (PARITY, MECHANISMS, PEERS))
    assert (ROOT / PARITY).exists()
