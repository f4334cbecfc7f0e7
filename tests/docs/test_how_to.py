"""docs/how-to/: the programs on the pages, run in an empty folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from forked_shell import ForkedShell
from installed import ROOT, Installed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PAGE = (ROOT / "docs" / "how-to" / "uneven-microbatches.md").read_text()


@pytest.mark.long
def test_uneven_microbatches_keep_the_loss_and_the_byte_limit(installed: Installed, tmp_path: Path) -> None:
    (program,) = re.findall(r'```python title="uneven.py"\n(.*?)```', PAGE, re.DOTALL)
    (tmp_path / "uneven.py").write_text(program)
    lines = installed.printed("python uneven.py", tmp_path).splitlines()
    shown = re.findall(r"^    (loss .+)$", PAGE.split("$ python uneven.py\n")[1].split("\n\n")[0], re.MULTILINE)
    assert [re.findall(r"loss \S+", line) for line in lines] == [re.findall(r"loss \S+", line) for line in shown]
    assert len({line.split()[1].rstrip(",") for line in lines}) == 1
    peaks = [int(peak) for peak in re.findall(r"KiB \[(.*)\]", lines[1])[0].split(", ")]
    assert max(peaks) <= 900


def test_the_pages_command_runs(shell: ForkedShell | Installed, tmp_path: Path) -> None:
    commands = re.findall(r"^    \$ (rrfp .+)$", PAGE, re.MULTILINE)
    assert len(commands) == 1
    assert "slot-aware-pyramid" in shell.printed(commands[0], tmp_path)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_case_from_the_trace_to_the_decision(installed: Installed, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "slow-step.md").read_text()
    ((name, program),) = re.findall(r'```python title="([^"]+)"\n(.*?)```', page, re.DOTALL)
    assert program.count("0.0018 if topology.stage == 1 else 0.0015") == 1
    (tmp_path / name).write_text(program.replace("0.0018", "0.00018").replace("0.0015", "0.00015"))
    record, costs, sweep, *decided = re.findall(r"^    \$ (.+)$", page, re.MULTILINE)
    assert installed.printed(record, tmp_path).startswith("{'strict': '1f1b'}: median ")
    said = installed.printed(costs, tmp_path)
    assert "sizes of microbatches: as step(sizes=...) had them" in said
    assert f"costs.json written: {sweep}\n" in said
    shown = re.findall(r"^(\S.+?)  +[\d.]+  +[\d.]+  +\d+  +[\d.]+$", installed.printed(sweep, tmp_path), re.MULTILINE)
    assert shown == [*(f"slot-aware-pyramid, limit {limit}" for limit in ("1f1b", "n", "2n")), "strict 1f1b"]
    for command in decided:
        assert "held (" in installed.printed(command, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_plan_makes_the_step_of_uneven_layers_shorter(installed: Installed, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "plan.md").read_text()
    ((name, program),) = re.findall(r'```python title="([^"]+)"\n(.*?)```', page, re.DOTALL)
    (tmp_path / name).write_text(program)
    record, plan, run = re.findall(r"^    \$ (.+)$", page, re.MULTILINE)
    (now,) = re.findall(r"a step takes (\d+) ms", installed.printed(record, tmp_path))
    planning = installed.run(plan, tmp_path)
    if "tasks shared cores" in planning.stderr and os.getloadavg()[0] > 4 * (os.cpu_count() or 1):
        pytest.skip(f"this machine is busy with other work: {planning.stderr}")
    assert planning.returncode == 0, planning.stderr
    table = planning.stdout
    # Three cuts are equally good: two stages of four layers and one of three, in any order, ahead of the head alone.
    assert re.search(r"^1 .* one chunk +(4\*2 3|4 3 4|3 4\*2) 1 ", table, re.MULTILINE)
    assert "wrote plan 1 to plan.json" in table
    (planned,) = re.findall(r"a step takes (\d+) ms", installed.printed(run, tmp_path))
    assert int(planned) < int(now)
