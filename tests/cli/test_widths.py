"""What the commands print fits 80 columns, and at 60 nothing is cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.shell import rrfp

from rrfp.costs import make_costs, write_costs

SWEEP = ("sweep", "--profile", "mllm", "--stages", "2,4", "--microbatches", "4", "--jobs", "1")
COMMANDS = {
    "simulate": ("simulate", "--strict", "1f1b"),
    "sweep": (*SWEEP, "--hint", "bf,slot-aware-pyramid", "--strict", "1f1b", "--seeds", "2"),
    "sweep of groups": (*SWEEP, "--hint", "bf", "--tp", "2", "--latency", "wire"),
    "hints": ("hints",),
    "transports": ("transports",),
    "check admission": ("check", "admission", "--stages", "2", "--microbatches", "2", "--limit", "1"),
    "check faults": ("check", "faults", "--runs", "10"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("width", [60, 80])
def test_tables_fit(command: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    words = COMMANDS[command]
    if command == "simulate":
        write_costs(tmp_path / "costs.json", make_costs("mllm", 3, 8, jitter="J2"))
        words = (*words, "--costs", str(tmp_path / "costs.json"))
    result = rrfp(*words)
    assert result.exit_code == 0, result.stderr
    assert "…" not in result.stdout
    table = [line for line in result.stdout.splitlines() if "  " in line.strip()]
    assert table
    assert max(len(line.rstrip()) for line in table) <= width
