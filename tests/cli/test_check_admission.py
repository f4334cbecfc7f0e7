"""`rrfp check admission`: every combination of the lists, a row for each rule and kind of step, and what is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys

import pytest
from cli.shell import rrfp

SMALL = ("check", "admission", "--stages", "1,2", "--microbatches", "2")


def test_rules_that_ship_pass() -> None:
    result = rrfp(*SMALL, "--rule", "staircase,paper", "--backward", "whole", "--in-order", "none")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].split() == [
        "rule",
        "C",
        "step",
        "order",
        "cases",
        "states",
        "s",
        "stuck",
        "D",
        "received",
        "buffered",
    ]
    rows = [line.split()[:5] for line in lines[1:-1]]
    assert rows == [
        ["staircase", "1", "whole", "-", "6"],
        ["staircase", "1", "forward", "-", "6"],
        ["staircase", "2", "whole", "-", "12"],
        ["paper", "2", "whole", "-", "12"],
        ["staircase", "2", "forward", "-", "12"],
        ["paper", "2", "forward", "-", "12"],
    ]
    assert lines[-1].startswith("60 cases, ")
    assert lines[-1].endswith(" states, 0 cases failed")


def test_a_wrong_rule_fails_with_the_shortest_way_into_its_deadlock() -> None:
    result = rrfp(
        *SMALL, "--chunks", "2", "--mode", "train", "--rule", "backward-drain", "--limit", "1,2", "--in-order", "none"
    )
    assert result.exit_code == 1
    assert result.stderr == (
        "rrfp: 8 of 16 cases fail, the first with the shortest way there: N=1 M=2 C=2 looped, whole backward, limit 1, "
        "backward-drain: deadlock after F0@0 F1@0; stage 0 holds 2, waits for: F0@1 (blocked by the memory limit)\n"
    )


def test_the_default_looks_at_the_reserve_rule_over_one_chunk_and_over_two() -> None:
    result = rrfp(*SMALL, "--backward", "whole")
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split()[:5] for line in result.stdout.splitlines()[1:-1]]
    assert ["staircase", "1", "whole", "B", "6"] in rows
    assert ["staircase", "2", "whole", "B", "12"] in rows
    wrong = rrfp(*SMALL, "--backward", "whole", "--rule", "unreserved", "--chunks", "2")
    assert wrong.exit_code == 1
    assert "unreserved, B in order (all): deadlock after" in wrong.stderr


@pytest.mark.parametrize("size", ["--stages", "--microbatches"])
def test_cases_that_would_not_end_are_refused_with_the_bound(size: str) -> None:
    result = rrfp("check", "admission", size, "2,49", "--chunks", "1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "have 49 forwards (the product), must be at most 48" in result.stderr


def test_a_terminal_shows_the_case_that_is_explored_and_ctrl_c_is_one_line() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    for name in ("CI", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "rrfp", "check", "admission", "--stages", "6", "--microbatches", "8"]
    command += ["--chunks", "1", "--limit", "8", "--full"]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = ""
    with contextlib.suppress(OSError):  # the end of a terminal
        while text := os.read(ours, 1 << 16).decode(errors="replace"):
            if "N=6 M=8 C=1" in text and "N=6 M=8 C=1" not in shown:
                process.send_signal(signal.SIGINT)
            shown += text
    os.close(ours)
    assert process.wait(timeout=50) == 130
    assert shown.rstrip().endswith("rrfp: interrupted")
    assert "Traceback" not in shown


def test_json_has_each_case() -> None:
    words = (*SMALL, "--chunks", "1", "--mode", "train", "--rule", "unreserved", "--in-order", "none,B", "--json")
    result = rrfp(*words, "--backward", "whole", "--limit", "1")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["ok"] is False
    assert [case["deadlock"] for case in document["cases"]] == [None, ["F1@0"], None, ["F1@0", "F1@1"]]
    last = document["cases"][-1]
    assert last["case"] == "N=2 M=2 C=1, whole backward, limit 1, unreserved, B in order (all)"
    assert (last["ok"], last["peak_held"], last["peak_received"], last["peak_buffered"]) == (
        False,
        [1, 1],
        [1, 1],
        [0, 1],
    )


def test_full_visits_more_states_and_finds_the_same() -> None:
    words = (*SMALL, "--chunks", "2", "--mode", "train", "--backward", "split", "--limit", "2", "--json")
    reduced, full = (json.loads(rrfp(*words, *more).stdout)["cases"] for more in ((), ("--full",)))
    assert sum(case["states"] for case in reduced) < sum(case["states"] for case in full)
    for one, other in zip(reduced, full, strict=True):
        assert [one[key] for key in ("case", "ok", "peak_held")] == [other[key] for key in ("case", "ok", "peak_held")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--stages", "0"), "stages has '0', must be whole numbers from 1, separated by commas"),
        (("--limit", "2n"), "limit has '2n', must be whole numbers from 1 or 1f1b, separated by commas"),
        (
            ("--rule", "banker"),
            "rule has 'banker', must be among: staircase, paper, backward-drain, unreserved, last-slot, step-slot, "
            "separated by commas",
        ),
        (("--in-order", "X"), "in-order has 'X', must be among: none, F, B, W, natural, separated by commas"),
        (("--placement", "zigzag"), "placement has 'zigzag', must be among: looped, v, separated by commas"),
        (("--limit", "9"), "no case is left: limits above M, or an order of a kind that no virtual stage runs"),
    ],
)
def test_bad_usage_names_the_option_and_the_choices(words: tuple[str, ...], message: str) -> None:
    result = rrfp(*SMALL, *words)
    assert (result.exit_code, result.stderr) == (2, f"rrfp: {message}\n")
