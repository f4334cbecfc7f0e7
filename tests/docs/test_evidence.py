"""The figures of the pages about evidence are those of the committed result files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence.blocks import BLOCKS, COMMANDS, PARITY, PEERS, less_time
from benchmarks.evidence.page import PAGES, ROOT, differing, filled


def write(root: Path, name: str, document: Any) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def over_torch(profile: str, jitter: str, ratio: float) -> dict[str, Any]:
    return {"method": "2n", "profile": profile, "jitter": jitter, "over": {"torch 1F1B": {"value": ratio}}}


def test_pages_have_the_figures_of_the_result_files() -> None:
    assert [page.name for page, _ in differing()] == []  # python -m benchmarks.evidence.page


def test_every_table_is_on_the_page() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    assert sorted(re.findall(r"<!-- figures: ([\w-]+) -->", text)) == sorted(BLOCKS)
    assert text.count("<!-- end -->") == len(BLOCKS)


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
    text = "takes <!--= less 2n | torch 1F1B | mllm -->1%<!--/--> less"
    assert filled(text, tmp_path) == text  # no result file
    cells = [over_torch("mllm", "J0", 0.744), over_torch("mllm", "J3", 0.69), over_torch("llm", "J0", 0.95)]
    write(tmp_path, PEERS, {"cells": cells})
    assert filled(text, tmp_path) == text.replace(">1%<", ">26 to 31%<")
    assert less_time(tmp_path, "2n", "torch 1F1B", "llm") == "5%"
    with pytest.raises(KeyError, match="no cell of n, mllm"):
        less_time(tmp_path, "n", "torch 1F1B", "mllm")


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
    assert all(name in text for name in COMMANDS)
    assert (ROOT / PARITY).exists()
