"""`rrfp simulate`: its JSON and exit codes are interfaces that other programs rely on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cli.shell import rrfp, rrfp_process

from rrfp.core.graph import Graph
from rrfp.core.schedule import Schedule
from rrfp.core.tasks import Kind, Task
from rrfp.costs import make_costs, write_costs
from rrfp.schedules import registry
from rrfp.schedules.needs import Needs

KEYS = ["makespan", "lower_bound", "ratio", "busy", "peak", "received_peak", "limit", "order", "start"]
#: Every hint but the schedules that need a split backward or two chunks.
HINTS = (
    *("bf", "fb", "b-priority", "f-priority", "bfw", "slot-aware", "slot-aware-pyramid", "bfw-pyramid"),
    *("gpipe", "1f1b", "interleaved-1f1b"),
)

SILENT_HINT = """
from rrfp import Hint

class Silent(Hint):
    may_wait = True

    def choose(self, ready, view):
        return next(iter(ready)) if view.stage == 0 else None

class Broken(Hint):
    def __init__(self):
        raise ValueError("no")
"""


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    write_costs(path, make_costs("mllm", 3, 8, jitter="J2", latency="wire"))
    return path


@pytest.fixture
def hint_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_hints.py"
    path.write_text(SILENT_HINT)
    return path


@pytest.mark.parametrize(
    "method",
    [("--hint", name) for name in HINTS]
    + [("--hint", "bf", "--limit", limit) for limit in ("1", "1f1b", "n", "2n")]
    + [("--strict", name) for name in ("gpipe", "1f1b", "interleaved-1f1b")],
    ids=" ".join,
)
def test_json_has_every_key(costs: Path, method: tuple[str, ...]) -> None:
    result = rrfp("simulate", "--costs", costs, *method, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    assert list(answer) == KEYS
    assert answer["ratio"] == answer["makespan"] / answer["lower_bound"] >= 1
    assert [len(stage) for stage in answer["order"]] == [len(stage) for stage in answer["start"]] == [16] * 3
    assert [len(answer[key]) for key in ("busy", "peak", "received_peak")] == [3] * 3
    assert answer["limit"] is None if method[0] == "--strict" else len(answer["limit"]) == 3


def test_same_file_same_bytes(costs: Path) -> None:
    first = rrfp_process("simulate", "--costs", costs, "--hint", "bf", "--json", hash_seed=1)
    second = rrfp_process("simulate", "--costs", costs, "--hint", "bf", "--json", hash_seed=2)
    assert first.returncode == 0
    assert first.stdout == second.stdout
    assert first.stdout.count("\n") == 1


def test_default_limit_is_2n(costs: Path) -> None:
    plain = rrfp("simulate", "--costs", costs, "--hint", "bf", "--json").stdout
    assert plain == rrfp("simulate", "--costs", costs, "--hint", "bf", "--limit", "2n", "--json").stdout
    assert json.loads(plain)["limit"] == [6, 6, 6]


def test_limit_n_is_n_on_every_stage(costs: Path) -> None:
    answer = json.loads(rrfp("simulate", "--costs", costs, "--hint", "bf", "--limit", "n", "--json").stdout)
    assert answer["limit"] == [3, 3, 3]
    assert max(answer["peak"]) == 3


def test_table_shows_every_stage(costs: Path) -> None:
    result = rrfp("simulate", "--costs", costs, "--strict", "1f1b")
    assert result.exit_code == 0
    for text in ("1f1b (strict): 3 stages, 8 microbatches", "received peak", "makespan", "lower bound", "ratio"):
        assert text in result.stdout


@pytest.mark.parametrize(("schedule", "chunks", "placement"), [("zb-h1", 1, "looped"), ("zb-v", 2, "v")])
@pytest.mark.parametrize("way", ["--hint", "--strict"])
def test_zero_bubble_schedules_run_on_split_costs(
    tmp_path: Path, way: str, schedule: str, chunks: int, placement: str
) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, make_costs("llm", 3, 8, chunks=chunks, placement=placement, split=True))  # type: ignore[arg-type]
    answer = json.loads(rrfp("simulate", "--costs", path, way, schedule, "--json").stdout)
    assert list(answer) == KEYS
    assert [len(stage) for stage in answer["order"]] == [3 * chunks * 8] * 3
    if way == "--strict":
        assert max(answer["peak"]) == 3 * chunks


@pytest.mark.parametrize(("chunks", "placement"), [(1, "looped"), (2, "looped"), (2, "v")])
def test_split_costs_and_chunks(tmp_path: Path, chunks: int, placement: str) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, make_costs("mllm", 3, 6, chunks=chunks, placement=placement, split=True))  # type: ignore[arg-type]
    for limit in ("1", "1f1b", "2n"):
        result = rrfp("simulate", "--costs", path, "--hint", "bfw", "--limit", limit, "--json")
        assert result.exit_code == 0
        answer = json.loads(result.stdout)
        assert all(peak <= k * chunks for peak, k in zip(answer["peak"], answer["limit"], strict=True))
        assert "W5@" in " ".join(answer["order"][0])


def test_timeline_and_trace_are_written(costs: Path, tmp_path: Path) -> None:
    picture, trace = tmp_path / "t.png", tmp_path / "t.json"
    result = rrfp("simulate", "--costs", costs, "--hint", "bf", "--timeline", picture, "--trace", trace)
    assert result.exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]


def test_deadlock_prints_its_report_and_exits_3(costs: Path, hint_file: Path) -> None:
    result = rrfp_process("simulate", "--costs", costs, "--hint", "my_hints:Silent", "--json", cwd=hint_file.parent)
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr.splitlines() == [
        "rrfp: deadlock: every stage is idle and nothing is in flight",
        "  stage 0: B0@0 waits for B0@1 from stage 1",
        "  stage 1: F0@1 is ready, and hint Silent waits for something else",
        "  stage 2: F0@2 waits for F0@1 from stage 1",
    ]


def test_hint_from_a_file(costs: Path, hint_file: Path) -> None:
    assert rrfp("simulate", "--costs", costs, "--hint", f"{hint_file}:Silent").exit_code == 3


BAD = {
    "no method": ((), "exactly one of --hint NAME and --strict NAME is needed"),
    "two methods": (("--hint", "bf", "--strict", "1f1b"), "exactly one of --hint NAME and --strict NAME is needed"),
    "strict and limit": (("--strict", "1f1b", "--limit", "2"), "--limit goes with --hint"),
    "unknown hint": (("--hint", "x"), "hint is 'x', must be one of: bf, fb, b-priority, f-priority, bfw, slot-aware"),
    "unknown schedule": (("--strict", "bf"), "strict is 'bf', must be one of: gpipe, 1f1b, interleaved-1f1b, zb-h1"),
    "schedule with chunks": (("--strict", "zb-v"), "schedule zb-v takes 2 chunks a stage"),
    "word as limit": (("--hint", "bf", "--limit", "all"), "must be a number of microbatches or one of: 1f1b, n, 2n"),
    "limit of 0": (("--hint", "bf", "--limit", "0"), "must be at least 1"),
    "negative limit": (("--hint", "bf", "--limit", "-1"), "must be at least 1"),
    "absent module": (("--hint", "no_such_module:X"), "cannot import 'no_such_module'"),
    "absent file": (("--hint", "no/such/file.py:X"), "cannot import 'no/such/file.py'"),
    "absent attribute": (("--hint", "json:X"), "'json' has no attribute 'X'"),
    "no hint": (("--hint", "json:JSONDecoder"), "has no method choose()"),
    "no factory": (("--hint", "json:loads"), "cannot be made (TypeError"),
    "unknown option": (("--hnt", "bf"), "No such option: --hnt (Possible options: "),
    "option without value": (("--hint",), "Option '--hint' requires an argument"),
    "extra argument": (("--hint", "bf", "more"), "unexpected extra argument"),
    "two hints": (("--hint", "bf,fb"), "a cost file runs one method, these are 2: lists go with --profile"),
    "one hint twice": (("--hint", "bf,bf"), "hint is 'bf,bf', must name 'bf' once"),
    "strict and admission": (("--strict", "1f1b", "--admission", "paper"), "--admission goes with --hint"),
    "hint and sends": (("--hint", "bf", "--sends", "blocking"), "--sends goes with --strict"),
    "unknown admission": (("--hint", "bf", "--admission", "x"), "admission is 'x', must be one of: staircase, paper"),
    "unknown sends": (("--strict", "1f1b", "--sends", "x"), "sends is 'x', must be one of: eager, blocking"),
    "blocking gpipe": (("--strict", "gpipe", "--sends", "blocking"), "only 1f1b has a blocking form"),
    "strict and sizes": (("--strict", "1f1b", "--sizes", "planned"), "--sizes goes with --hint"),
    "absent sizes": (("--hint", "bf", "--sizes", "no/such"), "sizes is 'no/such', must be planned or a file"),
    "a profile too": (("--hint", "bf", "--profile", "llm"), "exactly one of --costs FILE and --profile NAME"),
    "stages": (("--hint", "bf", "--stages", "4"), "--stages goes with --profile"),
    "seeds": (("--hint", "bf", "--seeds", "4"), "--seeds goes with --profile"),
    "csv": (("--hint", "bf", "--csv", "x.csv"), "--csv goes with --profile"),
    "unwritable picture": (
        ("--hint", "bf", "--timeline", "/no/such/dir/t.png"),
        "/no/such/dir/t.png: cannot be written",
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
        ({"placement": "ring"}, "placement is 'ring', must be one of looped, v"),
        ({"F": [[1]]}, "F has 1 rows, must have 2"),
        ({"B": [[1], [-1]]}, "B[1][0] is -1.0, must be a finite number >= 0"),
        ({"latency_F": [["1"]]}, "latency_F[0][0]"),
        ({"colour": 1}, "field 'colour' is unknown, must be one of stages, chunks"),
        ({"F": [[1e308], [1e308]]}, "the sum of all times is too large"),
    ],
)
def test_bad_file_names_the_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(GOOD_FILE | change))
    result = rrfp("simulate", "--costs", path, "--hint", "bf", "--json")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert message in result.stderr


def test_bad_usage_in_a_shell(tmp_path: Path) -> None:
    result = rrfp_process("simulate", "--costs", tmp_path / "absent.json", "--hint", "bf")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"rrfp: {tmp_path / 'absent.json'}: cannot be read (No such file or directory)\n"


SIZED_HINT = """
from rrfp import Hint

class LargestFirst(Hint):
    def microbatch_order(self, view):
        return sorted(range(view.microbatches), key=lambda m: -view.sizes[m])

    def choose(self, ready, view):
        return next(iter(ready))
"""


@pytest.mark.parametrize("sizes", ["planned", "file"])
def test_a_hint_is_told_the_sizes(tmp_path: Path, sizes: str) -> None:
    table = make_costs("mllm", 3, 4, seed=3)
    write_costs(tmp_path / "costs.json", table)
    (tmp_path / "sized.py").write_text(SIZED_HINT)
    total = (table.forward + table.backward).sum(axis=0).tolist()
    (tmp_path / "sizes.json").write_text(json.dumps(total))
    told = "planned" if sizes == "planned" else tmp_path / "sizes.json"
    hint = f"{tmp_path / 'sized.py'}:LargestFirst"
    result = rrfp("simulate", "--costs", tmp_path / "costs.json", "--hint", hint, "--sizes", told, "--json")
    order = json.loads(result.stdout)["order"][0]
    largest_first = sorted(range(4), key=lambda m: -total[m])
    assert [task for task in order if task[0] == "F"] == [f"F{m}@0" for m in largest_first]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "must be a list of 8 finite numbers >= 0, one a microbatch"),
        ("[1, 2, 3, 4, 5, 6, 7, -8]", "must be a list of 8 finite numbers >= 0"),
        ("[1, 2, 3, 4, 5, 6, 7, true]", "must be a list of 8 finite numbers >= 0"),
        ("[1, 2, 3, 4, 5, 6, 7, NaN]", "must be a list of 8 finite numbers >= 0"),
        ("{}", "must be a list of 8 finite numbers >= 0"),
        ("[1,", "is not JSON"),
    ],
)
def test_wrong_sizes_are_named(costs: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "sizes.json").write_text(text)
    result = rrfp("simulate", "--costs", costs, "--hint", "bf", "--sizes", tmp_path / "sizes.json")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "sizes.json: " in result.stderr
    assert message in result.stderr


def test_blocking_sends_are_never_faster(costs: Path) -> None:
    eager, blocking = (
        json.loads(rrfp("simulate", "--costs", costs, "--strict", "1f1b", "--sends", sends, "--json").stdout)
        for sends in ("eager", "blocking")
    )
    assert list(blocking) == KEYS
    assert blocking["makespan"] > eager["makespan"]
    assert (blocking["order"], blocking["peak"]) == (eager["order"], eager["peak"])
    assert blocking["lower_bound"] == eager["lower_bound"]


def test_neither_a_file_nor_a_profile() -> None:
    result = rrfp("simulate", "--hint", "bf")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "exactly one of --costs FILE and --profile NAME is needed" in result.stderr


def test_hint_whose_constructor_fails(costs: Path, hint_file: Path) -> None:
    result = rrfp("simulate", "--costs", costs, "--hint", f"{hint_file}:Broken")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "cannot be made (ValueError: no)" in result.stderr


def test_schedule_with_weights_is_refused_on_unsplit_costs(costs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def weighted(graph: Graph, microbatches: int) -> Schedule:
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
