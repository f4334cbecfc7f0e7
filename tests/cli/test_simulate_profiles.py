"""`rrfp simulate --profile`: one run says what a cost file of it says; large steps are shown in part."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import pytest
from cli.shell import rrfp, rrfp_process
from cli.test_simulate import KEYS

from rrfp.costs import make_costs, write_costs

OPTIONS = ("--stages", "3", "--microbatches", "6", "--jitter", "J2", "--latency", "wire", "--seed", "7")


@pytest.mark.parametrize(
    "method",
    [
        ("--hint", "bf", "--limit", "1f1b"),
        ("--hint", "bfw", "--admission", "paper"),
        ("--strict", "1f1b"),
        ("--strict", "1f1b", "--sends", "blocking"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("split", [False, True])
def test_a_profile_is_the_cost_file_that_make_costs_makes(tmp_path: Path, method: tuple[str, ...], split: bool) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, make_costs("mllm", 3, 6, jitter="J2", latency="wire", seed=7, split=split))
    flag = "--split" if split else "--no-split"
    result = rrfp("simulate", "--profile", "mllm", *OPTIONS, flag, *method, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert list(json.loads(result.stdout)) == KEYS
    assert result.stdout == rrfp("simulate", "--costs", path, *method, "--json").stdout


@pytest.mark.parametrize("placement", ["looped", "v"])
def test_chunks_and_placement_reach_the_table(tmp_path: Path, placement: str) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, make_costs("mllm", 3, 6, chunks=2, placement=placement))  # type: ignore[arg-type]
    options = ("--stages", "3", "--microbatches", "6", "--chunks", "2", "--placement", placement)
    result = rrfp("simulate", "--profile", "mllm", *options, "--hint", "bf", "--json")
    assert result.stdout == rrfp("simulate", "--costs", path, "--hint", "bf", "--json").stdout


def test_defaults_are_8_stages_and_64_microbatches() -> None:
    plain = rrfp("simulate", "--profile", "llm", "--hint", "bf", "--json").stdout
    size = ("--stages", "8", "--microbatches", "64", "--chunks", "1", "--placement", "looped", "--no-split")
    variation = ("--jitter", "J0", "--latency", "none", "--seed", "0")
    assert plain == rrfp("simulate", "--profile", "llm", *size, *variation, "--hint", "bf", "--json").stdout
    assert (len(json.loads(plain)["order"]), len(json.loads(plain)["order"][0])) == (8, 128)


def test_one_seed_is_a_single_run() -> None:
    options = ("--profile", "mllm", "--stages", "2", "--microbatches", "3", "--hint", "bf", "--json")
    assert rrfp("simulate", *options, "--seeds", "1").stdout == rrfp("simulate", *options).stdout


def test_the_title_names_the_workload() -> None:
    result = rrfp("simulate", "--profile", "mllm", *OPTIONS, "--split", "--strict", "1f1b")
    title = "1f1b (strict), mllm J2, latency wire, seed 7: 3 stages, 6 microbatches, split backward"
    assert title in " ".join(result.stdout.split())


def test_pictures_trace_and_row_of_one_run(tmp_path: Path) -> None:
    picture, trace, rows, plot = (tmp_path / name for name in ("t.png", "t.json", "r.csv", "p.png"))
    outputs = ("--timeline", picture, "--trace", trace, "--csv", rows, "--png", plot)
    result = rrfp("simulate", "--profile", "mllm", *OPTIONS, "--hint", "bf", *outputs, "--json")
    answer = json.loads(result.stdout)
    assert list(answer) == KEYS
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]
    with rows.open(newline="") as text:
        (row,) = csv.DictReader(text)
    assert (float(row["makespan"]), int(row["peak_max"])) == (answer["makespan"], max(answer["peak"]))


def test_a_table_of_many_stages_shows_the_ends_and_the_mean() -> None:
    options = ("--profile", "mllm", "--stages", "40", "--microbatches", "4", "--hint", "bf")
    lines = rrfp_process("simulate", *options).stdout.splitlines()
    first_cells = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert first_cells == [*map(str, range(8)), "... 24 more", *map(str, range(32, 40)), "mean"]


def test_a_timeline_of_a_huge_step_is_refused_before_it_runs(tmp_path: Path) -> None:
    size = ("--stages", "1024", "--microbatches", "256")
    began_s = time.monotonic()
    result = rrfp("simulate", "--profile", "llm", *size, "--hint", "bf", "--timeline", tmp_path / "t.png")
    assert time.monotonic() - began_s < 5
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "a timeline shows at most 20000 tasks, this step has 524288: take fewer stages" in result.stderr
    assert "--trace FILE.json" in result.stderr
    assert list(tmp_path.iterdir()) == []


BAD = {
    "no method": ((), "at least one of --hint NAME and --strict NAME is needed"),
    "unknown profile": (("--profile", "gpt", "--hint", "bf"), "profile is 'gpt', must be one of llm, mllm"),
    "no stages": (("--stages", "0", "--hint", "bf"), "stages is 0, must be a whole number >= 1"),
    "word as stages": (("--stages", "4,many", "--hint", "bf"), "stages is 'many', must be a whole number >= 1"),
    "half a microbatch": (
        ("--microbatches", "0.5", "--hint", "bf"),
        "microbatches is '0.5', must be a whole number >= 1",
    ),
    "no value": (("--stages", "", "--hint", "bf"), "stages is '', must be a whole number >= 1"),
    "no limit": (("--limit", "", "--hint", "bf"), "limit is '', must be a number of microbatches or one of"),
    "empty value": (("--stages", "4,", "--hint", "bf"), "stages is '', must be a whole number >= 1"),
    "chunks": (("--chunks", "-1", "--hint", "bf"), "chunks is -1, must be a whole number >= 1"),
    "placement": (("--placement", "x", "--hint", "bf"), "placement is 'x', must be one of looped, v"),
    "jitter": (("--jitter", "J0,J9", "--hint", "bf"), "jitter is 'J9', must be one of J0, J1, J2, J3"),
    "latency": (("--latency", "x", "--hint", "bf"), "latency is 'x', must be one of none, constant, constant:SECONDS"),
    "seconds": (("--latency", "constant:-1", "--hint", "bf"), "its seconds must be a finite number >= 0"),
    "seed": (("--seed", "-1", "--hint", "bf"), "Invalid value for '--seed'"),
    "seeds": (("--seeds", "0", "--hint", "bf"), "Invalid value for '--seeds'"),
    "jobs": (("--jobs", "0", "--hint", "bf"), "Invalid value for '--jobs'"),
    "sizes": (("--sizes", "planned", "--hint", "bf"), "--sizes goes with --costs"),
    "same value twice": (("--stages", "4,8,4", "--hint", "bf"), "stages is '4,8,4', must name '4' once"),
    "one unknown hint": (("--hint", "bf,x"), "hint is 'x', must be one of: bf"),
    "one unknown schedule": (("--strict", "1f1b,x"), "strict is 'x', must be one of: gpipe, 1f1b"),
    "one wrong limit": (
        ("--hint", "bf", "--limit", "2n,all"),
        "limit is 'all', must be a number of microbatches or one of",
    ),
    "limit without hint": (("--strict", "1f1b", "--limit", "2n"), "--limit goes with --hint"),
    "nothing fits": (("--chunks", "2", "--strict", "1f1b", "--seeds", "2"), "schedule 1f1b takes 1 chunk a stage"),
    "does not fit": (("--chunks", "2", "--strict", "1f1b"), "schedule 1f1b takes 1 chunk a stage"),
    "timeline of two": (("--hint", "bf,fb", "--timeline", "t.png"), "--timeline shows one run, these are 2"),
    "trace of two": (("--hint", "bf", "--seeds", "2", "--trace", "t.json"), "--trace shows one run, these are 2"),
    "unwritable csv": (("--hint", "bf", "--seeds", "2", "--csv", "/no/dir/r.csv"), "/no/dir/r.csv: cannot be written"),
    "unwritable plot": (("--hint", "bf", "--seeds", "2", "--png", "/no/dir/p.png"), "/no/dir/p.png: cannot be written"),
    "too much to draw": (
        ("--hint", "bf", "--limit", ",".join(map(str, range(1, 18))), "--png", "p.png"),
        "a plot shows at most 16 methods, this sweep has 17",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_usage_is_one_line_and_exit_2(name: str) -> None:
    words, message = BAD[name]
    profile = () if "--profile" in words else ("--profile", "llm")
    small = () if "--microbatches" in words else ("--microbatches", "2")
    result = rrfp("simulate", *profile, *small, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("rrfp: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


@pytest.mark.parametrize("option", ["--seeds", "--jobs"])
def test_a_wrong_number_leaves_an_existing_file_alone(tmp_path: Path, option: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("precious")
    assert rrfp("simulate", "--profile", "llm", "--hint", "bf,fb", "--csv", path, option, "0").exit_code == 2
    assert path.read_text() == "precious"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_1024_stages_by_256_microbatches_with_their_bound() -> None:
    """15 s are promised on a machine with nothing else to do; here as much as a busy one may need."""
    size = ("--stages", "1024", "--microbatches", "256")
    options = ("--profile", "mllm", *size, "--jitter", "J2", "--latency", "wire", "--hint", "bf")
    result = rrfp_process("simulate", *options, timeout_s=110)
    assert (result.returncode, result.stderr) == (0, "")
    assert "1024 stages, 256 microbatches" in result.stdout
    assert "lower bound" in result.stdout
