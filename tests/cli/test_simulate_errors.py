"""`rrfp simulate` on wrong options and files: one line that names the field, exit code 2."""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path

import pytest
from cli.shell import rrfp, rrfp_process

from rrfp.costs import make_costs, write_costs
from rrfp.model.graph import TaskGraph
from rrfp.model.schedule import Schedule
from rrfp.model.tasks import Kind, Task
from rrfp.schedules import registry
from rrfp.schedules.registry import Needs

BROKEN_HINT = """
from rrfp import Hint

class Broken(Hint):
    def __init__(self):
        raise ValueError("no")
"""


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    write_costs(path, make_costs("mllm", 3, 8, jitter="J2", latency="wire"))
    return path


BAD = {
    "two methods": (("--hint", "bf", "--strict", "1f1b"), "--hint and --strict exclude each other"),
    "strict and limit": (("--strict", "1f1b", "--limit", "2"), "--limit goes with --hint"),
    "unknown hint": (("--hint", "x"), "hint is 'x', must be one of: bf, fb, b-priority, f-priority, bfw, slot-aware"),
    "misspelt hint": (("--hint", "bff"), "hint is 'bff' (did you mean 'bf'?), must be one of: bf, fb, b-priority"),
    "unknown hint, other forms": (("--hint", "x"), "zb-v, or module:attribute, or file.py:attribute"),
    "unknown schedule": (("--strict", "bf"), "strict is 'bf', must be one of: gpipe, 1f1b, interleaved-1f1b, zb-h1"),
    "schedule with chunks": (("--strict", "zb-v"), "schedule zb-v takes 2 chunks a stage"),
    "word as limit": (("--hint", "bf", "--limit", "all"), "must be a number of microbatches or one of: 1f1b, n, 2n"),
    "limit of 0": (("--hint", "bf", "--limit", "0"), "must be a whole number >= 1"),
    "negative limit": (("--hint", "bf", "--limit", "-1"), "must be a whole number >= 1"),
    "absent module": (("--hint", "no_such_module:X"), "cannot import 'no_such_module'"),
    "absent file": (("--hint", "no/such/file.py:X"), "cannot import 'no/such/file.py'"),
    "no attribute": (("--hint", "mine.py"), "hint is 'mine.py', must be a name, module:attribute or file.py:attribute"),
    "absent attribute": (("--hint", "json:X"), "'json' has no attribute 'X'"),
    "no hint": (("--hint", "json:JSONDecoder"), "decoder.py), must be a name"),
    "a module": (("--hint", "os:path"), "hint is of type module, must be a name, or a subclass of rrfp.Hint"),
    "no factory": (("--hint", "json:loads"), "loads must be a factory that is called with (): loads() missing"),
    "unknown option": (("--hnt", "bf"), "No such option: --hnt (did you mean --hint?)"),
    "option without value": (("--hint",), "Option '--hint' requires an argument"),
    "extra argument": (("--hint", "bf", "more"), "unexpected extra argument"),
    "two hints": (("--hint", "bf,fb"), "rrfp simulate runs one method, these are 2: lists go with rrfp sweep"),
    "one hint twice": (("--hint", "bf,bf"), "hint is 'bf,bf', must name 'bf' once"),
    "strict and admission": (("--strict", "1f1b", "--admission", "paper"), "--admission goes with --hint"),
    "hint and sends": (("--hint", "bf", "--sends", "blocking"), "--sends goes with --strict"),
    "unknown admission": (("--hint", "bf", "--admission", "x"), "admission is 'x', must be one of: staircase, paper"),
    "unknown sends": (("--strict", "1f1b", "--sends", "x"), "sends is 'x', must be one of: eager, blocking"),
    "blocking gpipe": (("--strict", "gpipe", "--sends", "blocking"), "only 1f1b has a blocking form"),
    "strict and sizes": (("--strict", "1f1b", "--sizes", "planned"), "--sizes goes with --hint"),
    "absent sizes": (("--hint", "bf", "--sizes", "no/such"), "sizes is 'no/such', must be planned or a file"),
    "two limits": (("--hint", "bf", "--limit", "n,2n"), "these are 2: lists go with rrfp sweep"),
    "two sends": (("--strict", "1f1b", "--sends", "eager,blocking"), "these are 2: lists go with rrfp sweep"),
    "no split": (
        ("--strict", "zb-h1"),
        "has unsplit backward (record the job with split=True and make a cost file of that trace)",
    ),
    "no split for the order of a hint": (("--hint", "zb-h1"), "(record the job with split=True and make a cost file"),
    "split": (
        ("--strict", "zb-h1", "--split"),
        "--split goes with --profile multimodal; for --costs record the job with split=True and make a cost file of",
    ),
    "bytes by the paper's rule": (("--limit", "8MB", "--admission", "paper"), "and limit is '8MB': bytes"),
    "a profile too": (("--profile", "multimodal"), "exactly one of --costs FILE and --profile multimodal is needed"),
    "stages": (("--hint", "bf", "--stages", "4"), "--stages goes with --profile multimodal"),
    "chunks": (("--hint", "bf", "--chunks", "4"), "it is an option of rrfp sweep (see"),
    "seeds": (("--hint", "bf", "--seeds", "4"), "it is an option of rrfp sweep"),
    "csv": (("--hint", "bf", "--csv", "x.csv"), "it is an option of rrfp sweep"),
    "absent schedule": (("--strict", "no/such.csv"), "strict is 'no/such.csv': cannot be read (No such file"),
    "no group": (("--hint", "bf", "--tp", "0"), "--tp is 0, must be a whole number >= 1"),
    "coordination alone": (("--hint", "bf", "--coordination", "leader"), "--coordination goes with --tp"),
    "unknown coordination": (
        ("--hint", "bf", "--tp", "2", "--coordination", "x"),
        "coordination is 'x', must be one of: leader, agreement",
    ),
    "strict and coordination": (
        ("--strict", "1f1b", "--tp", "2", "--coordination", "leader"),
        "--coordination goes with --hint",
    ),
    "groups by the paper's rule": (("--hint", "bf", "--tp", "2", "--admission", "paper"), "must be staircase with tp"),
    "blocking groups": (("--strict", "1f1b", "--tp", "2", "--sends", "blocking"), "must be eager with tp"),
    "unwritable picture": (
        ("--hint", "bf", "--timeline", "/no/such/dir/t.png"),
        "/no/such/dir/t.png: cannot be written",
    ),
    "picture of no format": (
        ("--hint", "bf", "--timeline", "t.bmp"),
        "t.bmp: the suffix of a picture is '.bmp', must be one of: .png, .svg, .pdf",
    ),
    "unwritable trace": (("--hint", "bf", "--trace", "/no/such/dir/t.json"), "/no/such/dir/t.json: cannot be written"),
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_usage_is_one_line_and_exit_2(costs: Path, arguments: str) -> None:
    words, message = BAD[arguments]
    result = rrfp("simulate", "--costs", costs, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("rrfp: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (
            ("--profile", "llm"),
            [
                "profile is 'llm', must be multimodal; rrfp sweep has the profiles of chains",
                "exactly one of --costs FILE and --profile multimodal is needed",
            ],
        ),
        (
            ("--timeline", "/no/such/t"),
            [
                "/no/such/t: the suffix of a picture is '', must be one of: .png, .svg, .pdf",
                "/no/such/t: cannot be written (no such folder, or not allowed)",
            ],
        ),
    ],
)
def test_two_faults_are_two_lines(costs: Path, words: tuple[str, ...], messages: list[str]) -> None:
    result = rrfp("simulate", "--costs", costs, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [f"rrfp: {message}" for message in messages]


GOOD_FILE = {
    "stages": 2,
    "chunks": 1,
    "placement": "looped",
    "microbatches": 1,
    "F": [[1], [1]],
    "B": [[1], [1]],
    "latency_F": [[0]],
    "latency_B": [[0]],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 0}, "stages"),
        ({"placement": "ring"}, "placement is 'ring', must be one of: looped, v"),
        ({"F": [[1]]}, "F has 1 rows, must have 2"),
        ({"B": [[1], [-1]]}, "B[1][0] is -1.0, must be a finite number >= 0"),
        ({"latency_F": [["1"]]}, "latency_F[0][0]"),
        ({"colour": 1}, "field 'colour' is unknown, must be one of: stages, chunks"),
        ({"F": [[1e308], [1e308]]}, "the sum of all times is too large"),
    ],
)
def test_bad_file_names_the_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(GOOD_FILE | change))
    result = rrfp("simulate", "--costs", path, "--hint", "bf", "--json")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert message in result.stderr


def test_each_fault_of_a_file_has_a_line(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"colour": 1}))
    result = rrfp("simulate", "--costs", path, "--hint", "bf")
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"rrfp: {path}: ") for line in lines)


def test_bad_usage_in_a_shell(tmp_path: Path) -> None:
    result = rrfp_process("simulate", "--costs", tmp_path / "absent.json", "--hint", "bf")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"rrfp: {tmp_path / 'absent.json'}: cannot be read (No such file or directory)\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "must be a list of 8 finite numbers >= 0, one a microbatch"),
        ("[1, 2, 3, 4, 5, 6, 7, -8]", "must be a list of 8 finite numbers >= 0"),
        ("[1, 2, 3, 4, 5, 6, 7, true]", "must be a list of 8 finite numbers >= 0"),
        ("[1, 2, 3, 4, 5, 6, 7, NaN]", "must be a list of 8 finite numbers >= 0"),
        ("{}", "must be a list of 8 finite numbers >= 0"),
        ("[1,", "is not JSON (Expecting value at line 1 column 4)"),
    ],
)
def test_wrong_sizes_are_named(costs: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "sizes.json").write_text(text)
    result = rrfp("simulate", "--costs", costs, "--hint", "bf", "--sizes", tmp_path / "sizes.json")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "sizes.json: " in result.stderr
    assert message in result.stderr


def test_no_cost_file() -> None:
    result = rrfp("simulate", "--hint", "bf")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "exactly one of --costs FILE and --profile multimodal is needed" in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"0F0,0B0", "number of lines is 1, must be 3, one for each stage"),
        (
            b"0F0\n1F0,1X0\n2F0",
            "line 2, column 2: '1X0' must be a virtual stage, a type (F, B, I or W) and a microbatch",
        ),
        (b"0F0\n2F0\n1F0", "line 2, column 1: '2F0': the virtual stages of this line are 1"),
        (b"0F0,0B0\n1F0,1B0\n2F0,2B0", "stage 0 misses 14 task(s), the first is B1@0 (stage i is line i + 1"),
        (b"0F0\n\xff\n2F0", "is not CSV (not UTF-8 text)"),
    ],
)
@pytest.mark.parametrize("groups", [(), ("--tp", "2")])
def test_bad_schedule_file_names_the_line(
    costs: Path, tmp_path: Path, content: bytes, message: str, groups: tuple[str, ...]
) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(content)
    result = rrfp("simulate", "--costs", costs, "--strict", path, *groups)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert str(path) in result.stderr
    assert message in result.stderr


def test_a_timeline_of_a_huge_step_is_refused_before_it_runs(tmp_path: Path) -> None:
    write_costs(tmp_path / "costs.json", make_costs("llm", 101, 100))
    result = rrfp("simulate", "--costs", tmp_path / "costs.json", "--hint", "bf", "--timeline", tmp_path / "t.png")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "a timeline shows at most 20000 tasks, this step has 20200: take fewer stages" in result.stderr
    assert "--trace FILE.json" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def test_hint_whose_constructor_fails(costs: Path, tmp_path: Path) -> None:
    hint_file = tmp_path / "my_hints.py"
    hint_file.write_text(BROKEN_HINT)
    result = rrfp("simulate", "--costs", costs, "--hint", f"{hint_file}:Broken")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "cannot be made (ValueError: no)" in result.stderr


def test_schedule_with_weights_is_refused_on_unsplit_costs(costs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def weighted(graph: TaskGraph, microbatches: int) -> Schedule:
        stages = range(graph.placement.stages)
        return Schedule("w", tuple(tuple(Task(k, m, v) for m in range(microbatches) for k in Kind) for v in stages))

    monkeypatch.setitem(registry._KNOWN, "w", (weighted, Needs()))
    for option in ("--strict", "--hint"):
        result = rrfp("simulate", "--costs", costs, option, "w")
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert "schedule w: stage 0, entry 2: W0@0 does not run on this stage" in result.stderr


def test_missing_matplotlib_is_one_line(costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("matplotlib", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, module, None)
    result = rrfp("simulate", "--costs", costs, "--hint", "bf", "--timeline", tmp_path / "t.png")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "pip install 'rrfp[plot]'" in result.stderr


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--strict", "order.csv", "--trace", "order.csv"), "order.csv"),
        (("--hint", "bf", "--sizes", "sizes.json", "--trace", "sizes.json"), "sizes.json"),
        (("--hint", "own_hint.py:Own", "--trace", "own_hint.py"), "own_hint.py"),
        (("--hint", "bf", "--trace", "costs.json"), "costs.json"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "sweep"])
def test_what_a_command_reads_is_not_written_over(
    costs: Path, monkeypatch: pytest.MonkeyPatch, command: str, words: tuple[str, ...], name: str
) -> None:
    monkeypatch.chdir(costs.parent)
    for other, text in {"order.csv": "x", "sizes.json": "[1, 2, 3, 4, 5, 6, 7, 8]"}.items():
        Path(other).write_text(text)
    Path("own_hint.py").write_text("from rrfp.hints.priorities import BackwardForward as Own\n")
    before = Path(name).read_bytes()
    if command == "sweep":
        words = tuple("--csv" if word == "--trace" else word for word in words)
    result = rrfp(command, "--costs", "costs.json", *words)
    assert result.exit_code == 2
    assert f"{name}: is read by this command, must be another file to be written" in result.stderr
    assert Path(name).read_bytes() == before


def test_one_file_for_two_outputs_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = rrfp("simulate", "--profile", "multimodal", "--trace", out, "--save-costs", out)
    assert (result.exit_code, result.stderr.count("\n"), out.exists()) == (2, 1, False)
    assert f"{out}: is written twice by this command, must be a file of one option" in result.stderr


def test_sizes_may_come_from_a_pipe(costs: Path) -> None:
    """They are read once, whatever asks for them."""
    reading, writing = os.pipe()
    with open(writing, "w") as file:
        file.write("[1, 2, 3, 4, 5, 6, 7, 8]")
    try:
        result = rrfp("simulate", "--costs", costs, "--hint", "slot-aware-pyramid", "--sizes", f"/dev/fd/{reading}")
    finally:
        os.close(reading)
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_plugin_of_a_file_finds_its_neighbours_and_hides_no_module(
    costs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = costs.parent
    monkeypatch.chdir(folder)
    (folder / "neighbour_of_hint.py").write_text("from rrfp.hints.priorities import BackwardForward as Base\n")
    for name in ("hint_with_neighbour", "statistics"):
        (folder / f"{name}.py").write_text("from neighbour_of_hint import Base\n\nclass Own(Base):\n    pass\n")
    for _ in range(2):
        assert rrfp("simulate", "--costs", costs, "--hint", "hint_with_neighbour.py:Own").exit_code == 0
    result = rrfp("simulate", "--costs", costs, "--hint", "statistics.py:Own")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "its module would take the place of statistics (" in result.stderr
    assert statistics.__file__ in result.stderr
