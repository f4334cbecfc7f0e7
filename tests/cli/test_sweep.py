"""`rrfp sweep`: its CSV is that of single runs, and Ctrl-C leaves a valid part of it."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli.shell import rrfp, rrfp_process

from rrfp.costs import make_costs, write_costs
from rrfp.lab.sweep.runs import COLUMNS
from rrfp.lab.sweep.workloads import Workload

SMALL = ("sweep", "--profile", "mllm", "--microbatches", "6")
LISTS = (
    "--stages",
    "2,3",
    "--hint",
    "bf,bfw",
    "--limit",
    "1f1b,2n",
    "--strict",
    "1f1b",
    "--jitter",
    "J0,J3",
    "--split",
)

SILENT = """
from rrfp import Hint

class Silent(Hint):
    may_wait = True

    def choose(self, ready, view):
        return next(iter(ready)) if view.stage == 0 else None
"""


def read(text: str) -> list[dict[str, str]]:
    rows = list(csv.reader(text.splitlines()))
    assert tuple(rows[0]) == COLUMNS
    assert {len(row) for row in rows} == {len(COLUMNS)}
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows[1:]]


def test_rows_are_every_combination_and_equal_single_runs(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    assert rrfp(*SMALL, *LISTS, "--latency", "spike", "--seeds", "2", "--seed", "5", "--csv", path).exit_code == 0
    rows = read(path.read_text())
    assert len(rows) == 2 * 2 * 2 * (2 * 2 + 1)
    assert [row["seed"] for row in rows[:10]] == ["5"] * 5 + ["6"] * 5
    assert [row["method"] for row in rows[:5]] == ["bf", "bf", "bfw", "bfw", "1f1b"]
    for row in rows[::3]:
        method = ["--strict", row["method"]]
        if row["kind"] == "hint":
            method = ["--hint", row["method"], "--limit", row["limit"], "--admission", row["admission"]]
        named: Any = {name: row[name] for name in ("jitter", "latency")}
        workload = Workload(
            profile="mllm", stages=int(row["stages"]), microbatches=6, split=True, seed=int(row["seed"]), **named
        )
        write_costs(tmp_path / "costs.json", workload.costs())
        answer = json.loads(rrfp("simulate", "--costs", tmp_path / "costs.json", *method, "--json").stdout)
        assert [float(row[name]) for name in ("makespan", "lower_bound", "ratio")] == [
            answer[name] for name in ("makespan", "lower_bound", "ratio")
        ]
        peaks = (max(answer["peak"]), max(answer["received_peak"]))
        assert (int(row["peak_max"]), int(row["received_peak_max"])) == peaks


def test_json_of_several_runs(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    result = rrfp(*SMALL, *LISTS, "--seeds", "3", "--csv", path, "--json")
    assert (result.exit_code, result.stderr, result.stdout.count("\n")) == (0, "", 1)
    document = json.loads(result.stdout)
    assert list(document) == ["runs", "summary", "skipped"]
    assert [tuple(run) for run in document["runs"]] == [COLUMNS] * 60
    assert [run["makespan"] for run in document["runs"]] == [float(row["makespan"]) for row in read(path.read_text())]
    assert [len(group["seeds"]) for group in document["summary"]] == [3] * 20
    for group in document["summary"]:
        makespans = [run["makespan"] for run in document["runs"] if all(run[k] == group[k] for k in IDENTITY)]
        assert (group["makespan"]["min"], group["makespan"]["max"]) == (min(makespans), max(makespans))
        assert group["makespan"]["mean"] == pytest.approx(sum(makespans) / 3)
        assert group["speed_up"]["over"] == "strict 1f1b"
    assert document["skipped"] == []


IDENTITY = ("stages", "jitter", "method", "kind", "limit", "admission", "sends")


def test_table_shows_mean_spread_memory_and_speed_up() -> None:
    text = rrfp_process(*SMALL, *LISTS, "--seeds", "3").stdout
    for word in ("3 seeds: mean, least and most", "makespan (s)", "least - most", "peak held", "speed-up", "±", "J3"):
        assert word in text
    assert "speed-up over strict 1f1b, seed by seed" in text
    assert text.count("bfw, limit 1f1b") == 4


def test_table_of_one_seed_has_no_spread() -> None:
    text = rrfp_process(*SMALL, "--hint", "bf,bfw").stdout
    assert "seed 0" in text
    for word in ("±", "least", "speed-up"):
        assert word not in text


def test_one_seed_and_a_cost_file_are_not_compared_seed_by_seed(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    write_costs(file, make_costs("mllm", 2, 4))
    for workload in (SMALL, ("sweep", "--costs", file)):
        assert rrfp(*workload, "--hint", "bf", "--strict", "1f1b").stdout.endswith("\nspeed-up over strict 1f1b\n")


def test_what_does_not_fit_is_listed_once_and_the_rest_runs(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    options = ("--chunks", "1,2", "--stages", "2", "--hint", "bf", "--strict", "1f1b", "--seeds", "3", "--csv", path)
    result = rrfp_process(*SMALL, *map(str, options))
    lines = [line for line in result.stdout.splitlines() if "skipped" in line]
    assert lines == [
        "skipped 3 runs of strict 1f1b: schedule 1f1b takes 1 chunk a stage; the graph has 2 chunks a stage"
    ]
    assert [(row["chunks"], row["method"]) for row in read(path.read_text())] == [("1", "bf"), ("1", "1f1b")] * 3 + [
        ("2", "bf")
    ] * 3
    skipped = json.loads(rrfp(*SMALL, *options, "--json").stdout)["skipped"]
    assert [(one["chunks"], one["seed"], one["method"], one["kind"]) for one in skipped] == [
        (2, seed, "1f1b", "strict") for seed in range(3)
    ]


def test_number_of_processes_does_not_change_a_byte(tmp_path: Path) -> None:
    files = [tmp_path / f"{jobs}.csv" for jobs in (1, 3)]
    outputs = [
        rrfp_process(
            *SMALL, *LISTS, "--seeds", "2", "--jobs", jobs, "--csv", path, "--json", hash_seed=int(jobs)
        ).stdout
        for jobs, path in zip("13", files, strict=True)
    ]
    assert outputs[0] == outputs[1] != ""
    assert files[0].read_bytes() == files[1].read_bytes()


def test_blocking_and_eager_sends_are_two_methods(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    options = ("--strict", "1f1b,gpipe", "--sends", "eager,blocking", "--latency", "spike", "--csv", path)
    result = rrfp(*SMALL, *options)
    assert "skipped 1 run of strict gpipe: sends is 'blocking', must be eager" in " ".join(result.stdout.split())
    rows = read(path.read_text())
    assert [(row["method"], row["sends"]) for row in rows] == [
        ("1f1b", "eager"),
        ("1f1b", "blocking"),
        ("gpipe", "eager"),
    ]
    assert float(rows[1]["makespan"]) > float(rows[0]["makespan"])


def test_a_table_in_a_file_is_not_wrapped() -> None:
    title, heads, *rows = rrfp(*SMALL, *LISTS, "--seeds", "2").stdout.splitlines()
    assert title == "mllm, microbatches 6, split backward, latency none; 2 seeds: mean, least and most"
    wanted = ["stages", "jitter", "method", "makespan (s)", "least - most", "/ bound", "peak held", "speed-up"]
    assert [head.strip() for head in heads.split("  ") if head.strip()] == wanted
    assert sum(" ±" in row for row in rows) == 2 * 2 * 5


def test_plot_is_written(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    assert rrfp(*SMALL, *LISTS, "--plot", path).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_no_format_is_refused_before_anything_runs(tmp_path: Path) -> None:
    result = rrfp(*SMALL, *LISTS, "--plot", tmp_path / "p.gif", "--csv", tmp_path / "r.csv")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "p.gif: the suffix of a picture is '.gif', must be one of: .png, .svg, .pdf" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line() -> None:
    result = rrfp(*SMALL, *LISTS, "--csv", "/dev/full")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "rrfp: /dev/full: cannot be written (No space left on device)\n"


def test_missing_matplotlib_is_told_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = rrfp(*SMALL, *LISTS, "--plot", tmp_path / "p.png", "--csv", tmp_path / "r.csv")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "a plot needs matplotlib: pip install 'rrfp[plot]'" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_deadlock_names_the_run_and_exits_3(tmp_path: Path) -> None:
    (tmp_path / "my_hints.py").write_text(SILENT)
    path = tmp_path / "rows.csv"
    options = ("--stages", "2", "--hint", f"bf,{tmp_path / 'my_hints.py'}:Silent", "--jobs", "2", "--csv", str(path))
    result = rrfp_process(*SMALL, *options)
    assert (result.returncode, result.stdout) == (3, "")
    first, *others = result.stderr.splitlines()
    assert "my_hints.py:Silent on profile=mllm, stages=2" in first
    assert first.endswith("deadlock: every stage is idle and nothing is in flight")
    assert others == [
        "  stage 0 waits for: B0@0 (B0@1 owed by stage 1)",
        "  stage 1 waits for: F0@1 (ready, but hint Silent does not choose it)",
    ]
    assert [row["method"] for row in read(path.read_text())] == ["bf"]


def start(path: Path, **options: Any) -> subprocess.Popen[bytes]:
    """A sweep that would take minutes, in a process group of its own; its CSV file is a pipe, to wait for rows."""
    os.mkfifo(path)
    command = [sys.executable, "-m", "rrfp.cli", "sweep", "--profile", "mllm", "--stages", "4,16"]
    command += ["--hint", "bf,bfw", "--seeds", "1000", "--jobs", "2", "--csv", str(path)]
    return subprocess.Popen(command, start_new_session=True, **options)


@pytest.mark.parametrize("to_all", [True, False], ids=["Ctrl-C in a terminal", "kill -INT of one process"])
def test_ctrl_c_leaves_a_valid_part_of_the_file_and_no_process(tmp_path: Path, to_all: bool) -> None:
    path = tmp_path / "rows.csv"
    process = start(path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with path.open() as file:
        text = "".join(file.readline() for _ in range(4))
        (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
        text += file.read()
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, b"")
    rows = read(text)
    assert err.decode().splitlines() == [f"{path} has the first {len(rows)} of 4000 runs", "rrfp: interrupted"]
    assert 3 <= len(rows) < 4000
    assert [(row["stages"], row["seed"], row["method"]) for row in rows] == [
        ("4", str(index // 2), ("bf", "bfw")[index % 2]) for index in range(len(rows))
    ]
    assert text.endswith("\n")
    deadline_s = time.monotonic() + 5
    while alive_in(process.pid) and time.monotonic() < deadline_s:  # multiprocessing's tracker ends with its pipe
        time.sleep(0.01)
    assert alive_in(process.pid) == []


def alive_in(group: int) -> list[str]:
    """The processes of a group, without those that only wait to be reaped."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may end at any moment
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append((stat.parent / "cmdline").read_text())
    return found


def test_workers_of_a_killed_sweep_end_by_themselves(tmp_path: Path) -> None:
    """The guard of every test looks for processes that are left behind, and gives them 2 s."""
    path = tmp_path / "rows.csv"
    process = start(path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with path.open() as file:
        text = "".join(file.readline() for _ in range(4))
        process.kill()
        process.wait(timeout=20)
    assert len(read(text)) == 3


def test_the_bar_is_for_terminals_only(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "rrfp.cli", *SMALL, "--hint", "bf,bfw"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    for name in ("CI", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment)
    os.close(theirs)
    out, _ = process.communicate(timeout=50)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert process.returncode == 0
    assert "2/2" in shown
    assert "2/2" not in out.decode()
    assert rrfp_process(*SMALL, "--hint", "bf,bfw").stderr == ""


def test_a_limit_that_gains_nothing_has_a_line_with_the_reason() -> None:
    """1f1b and n hold the same on stage 0, where every microbatch enters."""
    result = rrfp(
        "sweep", "--profile", "llm", "--stages", "4", "--microbatches", "16", "--hint", "bf", "--limit", "9,10"
    )
    assert result.stdout.splitlines()[-1] == (
        "bf, limit 10 gains nothing over 9: with 9 the step is already at the lower bound of 10: no order is faster"
    )
    options = ("--profile", "mllm", "--stages", "8,4", "--microbatches", "16", "--hint", "bf", "--limit", "n,1f1b")
    lines = rrfp("sweep", *options).stdout.splitlines()[-2:]
    for line, stages in zip(lines, (8, 4), strict=True):
        both = f"gains nothing over 1f1b: stage 0 holds at most {stages} under both, and every microbatch passes it"
        assert line.startswith(f"bf, limit n (stages {stages}) {both}; it idles ")
    many = rrfp(
        "sweep", "--profile", "llm", "--microbatches", "8", "--hint", "bf", "--limit", "9,10,11,12,13,14,15,16,17"
    )
    assert many.stdout.splitlines()[-1] == "2 more limits gain nothing over smaller ones"
