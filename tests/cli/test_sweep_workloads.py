"""Workloads of `rrfp sweep`: a profile's row says what a cost file of it says; files themselves may be swept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.shell import rrfp, rrfp_process

from rrfp.costs import make_costs, read_costs, write_costs

OPTIONS = ("--stages", "3", "--microbatches", "6", "--jitter", "J2", "--latency", "wire", "--seed", "7")
FIGURES = ("makespan", "lower_bound", "ratio", "peak_max", "received_peak_max", "busy_share", "digest")


def rows(*arguments: str | Path) -> list[dict[str, Any]]:
    result = rrfp("sweep", *arguments, "--json")
    assert (result.exit_code, result.stderr, result.stdout.count("\n")) == (0, "", 1)
    runs: list[dict[str, Any]] = json.loads(result.stdout)["runs"]
    return runs


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
    (of_profile,) = rows("--profile", "mllm", *OPTIONS, "--split" if split else "--no-split", *method)
    (of_file,) = rows("--costs", path, *method)
    assert {name: of_file[name] for name in FIGURES} == {name: of_profile[name] for name in FIGURES}
    single = json.loads(rrfp("simulate", "--costs", path, *method, "--json").stdout)
    assert (of_file["makespan"], of_file["peak_max"]) == (single["makespan"], max(single["peak"]))


@pytest.mark.parametrize("placement", ["looped", "v"])
def test_chunks_and_placement_reach_the_table(placement: str) -> None:
    options = ("--stages", "3", "--microbatches", "6", "--chunks", "2", "--placement", placement)
    (row,) = rows("--profile", "mllm", *options, "--hint", "bf")
    assert row["digest"] == make_costs("mllm", 3, 6, chunks=2, placement=placement).digest()  # type: ignore[arg-type]
    assert (row["chunks"], row["placement"]) == (2, placement)


def test_defaults_are_8_stages_and_64_microbatches() -> None:
    size = ("--stages", "8", "--microbatches", "64", "--chunks", "1", "--placement", "looped", "--no-split")
    variation = ("--jitter", "J0", "--latency", "none", "--seed", "0")
    plain = rows("--profile", "llm", "--hint", "bf")
    assert plain == rows("--profile", "llm", *size, *variation, "--hint", "bf")
    assert (plain[0]["stages"], plain[0]["microbatches"]) == (8, 64)


def test_several_files_are_several_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # short names, so that no line of the table wraps
    paths = ["a.json", "b.json", "c.json"]
    tables = [make_costs("mllm", stages, 6, split=True) for stages in (2, 3, 4)]
    for path, table in zip(paths, tables, strict=True):
        write_costs(path, table)
    lists = ("--costs", f"{paths[0]},{paths[1]}", "--costs", paths[2], "--hint", "bfw", "--strict", "zb-h1")
    found = rows(*lists)
    assert [(row["costs"], row["stages"], row["method"]) for row in found] == [
        (path, stages, method) for path, stages in zip(paths, (2, 3, 4), strict=True) for method in ("bfw", "zb-h1")
    ]
    assert {(row["profile"], row["seed"], row["latency"], row["split"]) for row in found} == {(None, None, None, True)}
    title, heads, *lines = rrfp("sweep", *lists).stdout.splitlines()
    assert title == "microbatches 6, split backward"
    assert heads.split()[:3] == ["costs", "stages", "method"]
    assert sum("1.000" in line and "strict zb-h1" in line for line in lines) == 3


@pytest.mark.parametrize("sizes", ["planned", "file"])
def test_hints_receive_the_sizes_of_files(tmp_path: Path, sizes: str) -> None:
    table = make_costs("mllm", 8, 16, seed=3)
    write_costs(tmp_path / "costs.json", table)
    (tmp_path / "sizes.json").write_text(json.dumps((table.forward + table.backward).sum(axis=0).tolist()))
    source = "planned" if sizes == "planned" else tmp_path / "sizes.json"
    options = ("--costs", tmp_path / "costs.json", "--hint", "slot-aware-pyramid", "--limit", "1f1b")
    (sized,), (unsized,) = rows(*options, "--sizes", source), rows(*options)
    single = json.loads(rrfp("simulate", *options, "--sizes", source, "--json").stdout)
    assert sized["makespan"] == single["makespan"] != unsized["makespan"]


def test_saved_costs_are_those_that_ran(tmp_path: Path) -> None:
    options = ("--profile", "mllm", *OPTIONS, "--seeds", "2", "--chunks", "2", "--split", "--hint", "bf,fb")
    folder = tmp_path / "new" / "costs"
    found = rows(*options, "--save-costs", folder)
    names = [f"mllm-3x6-2chunks-looped-split-J2-wire-seed{seed}.json" for seed in (7, 8)]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert [read_costs(folder / name).digest() for name in names] == [found[0]["digest"], found[2]["digest"]]


def test_a_schedule_file_is_a_method(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    options = ("--profile", "mllm", "--stages", "2,3", "--microbatches", "2", "--strict", f"1f1b,{path}")
    result = rrfp("sweep", *options, "--json")
    document = json.loads(result.stdout)
    assert [(row["stages"], row["method"]) for row in document["runs"]] == [(2, "1f1b"), (2, str(path)), (3, "1f1b")]
    assert document["runs"][0]["makespan"] == document["runs"][1]["makespan"]
    assert document["skipped"][0]["reason"] == f"schedule {path}: number of lines is 2, must be 3, one for each stage"


BAD = {
    "no method": ((), "at least one of --hint NAME and --strict NAME is needed"),
    "unknown profile": (
        ("--profile", "gpt", "--hint", "bf"),
        "profile is 'gpt', must be one of: llm, mllm, modalities,",
    ),
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
    "placement": (("--placement", "x", "--hint", "bf"), "placement is 'x', must be one of: looped, v"),
    "jitter": (("--jitter", "J0,J9", "--hint", "bf"), "jitter is 'J9', must be one of: J0, J1, J2, J3"),
    "latency": (("--latency", "x", "--hint", "bf"), "latency is 'x', must be one of: none, constant, constant:SECONDS"),
    "seconds": (("--latency", "constant:-1", "--hint", "bf"), "its seconds must be a finite number >= 0"),
    "seed": (("--seed", "-1", "--hint", "bf"), "--seed is -1, must be a whole number >= 0"),
    "seeds": (("--seeds", "0", "--hint", "bf"), "--seeds is 0, must be a whole number >= 1"),
    "jobs": (("--jobs", "0", "--hint", "bf"), "--jobs is 0, must be a whole number >= 1"),
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
    "timeline": (("--hint", "bf,fb", "--timeline", "t.png"), "it is an option of rrfp simulate (see"),
    "trace": (("--hint", "bf", "--trace", "t.json"), "it is an option of rrfp simulate (see"),
    "a cost file too": (("--costs", "x.json", "--hint", "bf"), "exactly one of --costs FILE and --profile NAME"),
    "unwritable costs": (("--hint", "bf", "--save-costs", "/proc/no/dir"), "/proc/no/dir: cannot be written"),
    "unwritable csv": (("--hint", "bf", "--seeds", "2", "--csv", "/no/dir/r.csv"), "/no/dir/r.csv: cannot be written"),
    "unwritable plot": (
        ("--hint", "bf", "--seeds", "2", "--plot", "/no/dir/p.png"),
        "/no/dir/p.png: cannot be written",
    ),
    "too much to draw": (
        ("--hint", "bf", "--limit", ",".join(map(str, range(1, 18))), "--plot", "p.png"),
        "a plot shows at most 16 methods, this sweep has 17",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_usage_is_one_line_and_exit_2(name: str) -> None:
    words, message = BAD[name]
    profile = () if "--profile" in words else ("--profile", "llm")
    small = () if "--microbatches" in words else ("--microbatches", "2")
    result = rrfp("sweep", *profile, *small, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("rrfp: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_neither_a_file_nor_a_profile() -> None:
    result = rrfp("sweep", "--hint", "bf")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "exactly one of --costs FILE and --profile NAME is needed" in result.stderr


@pytest.mark.parametrize("option", [("--stages", "4"), ("--seeds", "2"), ("--split",), ("--save-costs", ".")])
def test_options_of_a_profile_do_not_go_with_files(tmp_path: Path, option: tuple[str, ...]) -> None:
    write_costs(tmp_path / "costs.json", make_costs("mllm", 3, 6))
    result = rrfp("sweep", "--costs", tmp_path / "costs.json", "--hint", "bf", *option)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"{option[0]} goes with --profile; a cost file is one workload by itself" in result.stderr


@pytest.mark.parametrize("option", ["--seeds", "--jobs"])
def test_a_wrong_number_leaves_an_existing_file_alone(tmp_path: Path, option: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("precious")
    assert rrfp("sweep", "--profile", "llm", "--hint", "bf,fb", "--csv", path, option, "0").exit_code == 2
    assert path.read_text() == "precious"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_1024_stages_by_256_microbatches_with_their_bound() -> None:
    """15 s are promised on a machine with nothing else to do; here as much as a busy one may need."""
    size = ("--stages", "1024", "--microbatches", "256")
    options = ("--profile", "mllm", *size, "--jitter", "J2", "--latency", "wire", "--hint", "bf")
    result = rrfp_process("sweep", *options, timeout_s=110)
    assert (result.returncode, result.stderr) == (0, "")
    assert "stages 1024, microbatches 256" in result.stdout
    assert "/ bound" in result.stdout
