"""The line itself: help where nothing is asked, a line for each fault, completion, and `python -m rrfp`."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli.shell import rrfp
from typer.testing import CliRunner

from rrfp.commands.app import app
from rrfp.costs import make_costs, write_costs


@pytest.mark.parametrize("group", [(), ("check",)])
def test_a_group_without_a_command_prints_its_help(group: tuple[str, ...]) -> None:
    bare = rrfp(*group)
    assert (bare.exit_code, bare.stderr) == (0, "")
    assert bare.stdout.split() == rrfp(*group, "--help").stdout.split()


@pytest.mark.parametrize("words", [(), ("demo",), ("sweep",), ("check", "admission")], ids=" ".join)
def test_help_shows_no_value_for_a_flag(words: tuple[str, ...]) -> None:
    page = rrfp(*words, "--help").stdout
    assert "--help" in page
    assert "bool" not in page.casefold()


def test_the_help_groups_commands_by_what_one_wants() -> None:
    page = rrfp("--help").stdout
    heads = ["First look", "My job", "What if", "Extend"]
    places = [page.index(f" {head} ") for head in heads]
    assert places == sorted(places)
    groups = dict(zip(heads, itertools.pairwise([*places, len(page)]), strict=True))
    commands = {"My job": ("trace", "top", "costs"), "What if": ("simulate", "sweep"), "Extend": ("hints", "check")}
    for head, names in commands.items():
        for name in names:
            assert f"│ {name} " in page[slice(*groups[head])]


def test_a_misspelt_command_is_answered_with_the_right_one() -> None:
    result = rrfp("chek")
    assert result.exit_code == 2
    assert result.stderr.startswith("rrfp: No such command 'chek', must be one of: demo, ")
    assert result.stderr.endswith("; did you mean 'check'? (see rrfp --help)\n")


def test_a_misspelt_option_is_answered_with_the_most_similar_one() -> None:
    result = rrfp("sweep", "--hnt", "bf", "--profile", "llm", "--strict", "1f1b")
    assert result.exit_code == 2
    assert result.stderr == "rrfp: No such option: --hnt (did you mean --hint?) (see rrfp sweep --help)\n"


def test_an_option_that_is_like_no_other_is_answered_with_none() -> None:
    result = rrfp("simulate", "--png", "a.png", "--profile", "multimodal")
    assert (result.exit_code, result.stderr) == (2, "rrfp: No such option: --png (see rrfp simulate --help)\n")


SEVERAL = {
    "options of the sibling, a hint and a missing option": (
        ("simulate", "--hint", "nope", "--chunks", "2", "--seeds", "0"),
        [
            "No such option: --chunks; it is an option of rrfp sweep",
            "No such option: --seeds; it is an option of rrfp sweep",
            "exactly one of --costs FILE and --profile multimodal is needed",
            "hint is 'nope', must be one of: bf",
            " (see rrfp simulate --help)",
        ],
    ),
    "values of the workload and of the method": (
        ("sweep", "--hint", "nope", "--profile", "nope", "--stages", "0,-1", "--limit", "all", "--tp", "x"),
        ["hint is 'nope'", "profile is 'nope'", "stages is 0", "stages is -1", "limit is 'all'", "tp is 'x'"],
    ),
    "a value, and options that do not go together": (
        ("simulate", "--costs", "no/such", "--strict", "nope", "--limit", "2", "--coordination", "x", "--sends", "x"),
        [
            "no/such: cannot be read",
            "strict is 'nope'",
            "coordination is 'x'",
            "sends is 'x'",
            "--limit goes with --hint",
            "--coordination goes with --hint",
            "--coordination goes with --tp",
        ],
    ),
    "neither workload nor method": (
        ("sweep", "--sends", "blocking"),
        ["exactly one of --costs FILE and --profile NAME", "at least one of --hint", "--sends goes with --strict"],
    ),
    "a profile's options beside a file": (
        ("sweep", "--costs", "a", "--hint", "bf", "--stages", "2", "--save-costs", "."),
        ["--stages goes with --profile", "--save-costs goes with --profile"],
    ),
    "a range and a type": (
        ("sweep", "--profile", "llm", "--hint", "bf", "--seed", "-1", "--jobs", "x", "--nope=3"),
        [
            "No such option: --nope",
            "--seed is -1, must be a whole number >= 0",
            "--jobs is 'x', must be a whole number",
        ],
    ),
    "a missing value": (
        ("simulate", "--hint", "nope", "--costs"),
        ["Option '--costs' requires an argument", "hint is 'nope'", "exactly one of --costs FILE and --profile"],
    ),
    "an unknown option with a negative value": (
        ("check", "faults", "--sed", "-1", "--hint", "nope"),
        ["No such option: --sed", "hint is 'nope'"],
    ),
    "two words": (("check", "faults", "--runs", "0", "--trace"), ["runs is 0", "--trace goes with one run"]),
    "lists": (("check", "admission", "--stages", "0", "--rule", "x"), ["stages has '0'", "rule has 'x'"]),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_each_fault_is_a_line(case: str) -> None:
    words, messages = SEVERAL[case]
    result = rrfp(*words)
    lines = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(lines) == len([message for message in messages if not message.startswith(" (see")])
    assert all(line.startswith("rrfp: ") for line in lines)
    for message in messages:
        assert sum(message in line for line in lines) == 1, (message, result.stderr)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trace missing.json --task F1", "task 'F1' is not of the form F3@5"),
        ("advise missing.json --strict nope", "strict is 'nope', must be one of: gpipe, 1f1b"),
        ("plan missing.json --memory much", "memory is 'much', must be a size such as 8GB"),
        ("plan missing.json --out .", ".: cannot be written (is a folder)"),
        ("costs missing.json --step odd", "step is 'odd', must be a step's number or one of: typical, median, mean"),
        ("costs missing.json --latency odd", "latency is 'odd', must be one of: none, constant"),
        ("costs missing.json --out .", ".: cannot be written (is a folder)"),
    ],
)
def test_what_is_wrong_by_itself_is_refused_before_a_file_is_read(line: str, message: str) -> None:
    result = rrfp(*line.split())
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"rrfp: {message}")


def test_a_word_behind_an_unknown_option_is_no_fault_of_its_own() -> None:
    result = rrfp("check", "faults", "--sed", "1")
    assert "unexpected extra argument" not in result.stderr
    assert "'--costs'" not in rrfp("simulate", "--hint", "nope", "--costs").stderr.replace("Option '--costs'", "")


def test_the_default_hint_is_that_of_the_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, make_costs("mllm", 3, 8, jitter="J2", split=True))
    named = rrfp("simulate", "--costs", path, "--hint", "slot-aware-pyramid", "--limit", "n", "--json")
    assert rrfp("simulate", "--costs", path, "--limit", "n", "--json").stdout == named.stdout
    assert named.exit_code == 0
    assert "slot-aware-pyramid" in rrfp("simulate", "--help").stdout


def completions(line: str) -> list[str]:
    """The words that a bash offers behind ``line``."""
    environment = {"_RRFP_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    return CliRunner().invoke(app, [], env=environment, prog_name="rrfp").stdout.split()


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("rrfp ", ["demo", "simulate", "sweep", "check"]),
        ("rrfp check ", ["faults", "admission", "hint", "transport", "lane"]),
        ("rrfp simulate --str", ["--strict"]),
        ("rrfp simulate --hint b", ["bf", "b-priority", "bfw"]),
        ("rrfp simulate --strict z", ["zb-h1", "zb-v"]),
        ("rrfp simulate --limit ", ["1f1b", "n", "2n"]),
        ("rrfp sweep --hint bf,z", ["bf,zb-h1", "bf,zb-v"]),
        ("rrfp sweep --profile ", ["llm", "mllm"]),
        ("rrfp sweep --jitter J", ["J0", "J3"]),
        ("rrfp sweep --placement ", ["looped", "v"]),
        ("rrfp check hint slot", ["slot-aware", "slot-aware-pyramid"]),
        ("rrfp check transport ", ["inproc", "zmq"]),
        ("rrfp check lane ", ["thread", "cuda", "timer", "double"]),
    ],
)
def test_commands_options_and_names_complete(line: str, some: list[str]) -> None:
    assert set(some) <= set(completions(line))


def test_as_a_module_it_is_rrfp_and_completes_without_torch() -> None:
    def module(line: str | None, *arguments: str) -> str:
        asks = {} if line is None else {"_RRFP_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": "3"}
        blocked = "import sys, runpy; sys.modules['torch'] = None; runpy.run_module('rrfp', run_name='__main__')"
        command = [sys.executable, "-c", blocked, *arguments]
        environment = {**os.environ, **asks}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=50).stdout

    assert "Usage: rrfp simulate" in module(None, "simulate", "--help")
    assert "zmq" in module("rrfp check transport ").split()
    assert "double" in module("rrfp check lane ").split()
