"""The cost file: round trips bitwise, and says in one line what is wrong with a malformed one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rrfp.costs import from_json, make_costs, read_costs, to_json, with_jitter, with_latency, write_costs
from rrfp.errors import ConfigError
from rrfp.lab.simulation import read_sizes

GOOD: dict[str, Any] = {
    "stages": 2,
    "chunks": 1,
    "placement": "looped",
    "microbatches": 2,
    "F": [[1, 2], [3, 4]],
    "B": [[2.5, 4], [6, 8]],
    "latency_F": [[0, 0]],
    "latency_B": [[0.25, 0]],
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (3, 2)])
def test_round_trip_is_bitwise(tmp_path: Path, split: bool, stages: int, chunks: int) -> None:
    options: dict[str, Any] = {"chunks": chunks, "placement": "v", "split": split, "sized": split}
    costs = make_costs("mllm", stages, 5, jitter="J3", latency="spike", **options)
    write_costs(tmp_path / "costs.json", costs)
    assert read_costs(tmp_path / "costs.json") == costs
    assert ("W" in json.loads(to_json(costs))) == ("bytes" in json.loads(to_json(costs))) == split


def test_reads_the_documented_form() -> None:
    costs = from_json(json.dumps(GOOD))
    assert (costs.stages, costs.microbatches, costs.split) == (2, 2, False)
    assert costs.backward.tolist() == [[2.5, 4], [6, 8]]
    assert costs.latency_backward.tolist() == [[0.25, 0]]
    assert from_json(json.dumps(GOOD | {"W": [[1, 1], [1, 1]]})).split
    assert costs.held is None
    assert costs.held_bytes(0, 1) == 0
    sized = from_json(json.dumps(GOOD | {"bytes": [[1, 2], [3, 4.5]]}))
    assert [sized.held_bytes(m, 1) for m in range(2)] == [3, 4]
    assert sized != costs
    assert sized.digest() != costs.digest()


def test_sizes_of_microbatches_go_with_the_costs() -> None:
    costs, sized = from_json(json.dumps(GOOD)), from_json(json.dumps(GOOD | {"sizes": [512, 0]}))
    assert (costs.sizes, sized.sizes) == (None, (512.0, 0.0))
    assert from_json(to_json(sized)) == sized != costs
    assert "sizes" not in json.loads(to_json(costs))
    assert sized.digest() == costs.digest(), "what tasks take does not depend on sizes"
    assert sized.to_unsplit().sizes == with_latency(sized, "wire").sizes == with_jitter(sized, "J1").sizes == (512, 0)


@pytest.mark.parametrize("field", list(GOOD))
def test_only_w_bytes_and_sizes_may_be_missing(field: str) -> None:
    rest = {name: value for name, value in GOOD.items() if name != field}
    with pytest.raises(ConfigError, match=f"^field {field} is missing$"):
        from_json(json.dumps(rest))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"G": 1},
            "field 'G' is unknown, must be one of: stages, chunks, placement, microbatches, F, B, W, latency_F,",
        ),
        ({"stages": "2"}, "stages is '2', must be a whole number >= 1"),
        ({"stages": 10**4000, "chunks": 10**4000}, "stages is a number of 13288 bits, must be at most"),
        ({"placement": None}, "placement is None, must be one of: looped, v"),
        ({"placement": ["v"]}, "placement is ['v'], must be one of: looped, v"),
        ({"F": {}}, "F must be a list of rows of numbers"),
        ({"W": None}, "W must be a list of rows of numbers"),
        ({"bytes": [[1, 1], [1, -1]]}, "bytes[1][1] is -1.0, must be a finite number >= 0"),
        ({"bytes": [[1, 1]]}, "bytes has 1 rows, must have 2 (stages x chunks)"),
        ({"F": [[1, 2], "ab"]}, "F[1] must be a list of 2 numbers (one a microbatch)"),
        ({"F": [[1, 2], [3]]}, "F[1] has 1 entries, must have 2 (one a microbatch)"),
        ({"F": [[1, 2], [3, True]]}, "F[1][1] is true, must be a finite number >= 0"),
        ({"F": [[1, 2], [3, "4"]]}, 'F[1][1] is "4", must be a finite number >= 0'),
        ({"F": [[1, 2], [3, [4]]]}, "F[1][1] is [4], must be a finite number >= 0"),
        ({"B": [[1, 2], [3, float("nan")]]}, "B[1][1] is nan, must be a finite number >= 0"),
        ({"B": [[-1, 2], [3, 4]]}, "B[0][0] is -1.0, must be a finite number >= 0"),
        ({"sizes": None}, "sizes must be a list of numbers, one a microbatch"),
        ({"sizes": 3}, "sizes must be a list of numbers, one a microbatch"),
        ({"sizes": [1]}, "sizes has 1 entries, must have 2, one a microbatch"),
        ({"sizes": [1, -1]}, "sizes[1] is -1, must be a finite number >= 0"),
        ({"sizes": [1, float("nan")]}, "sizes[1] is nan, must be a finite number >= 0"),
        ({"sizes": [10**400, 1]}, "sizes[0] is 1000"),
        ({"sizes": [1, True]}, "sizes[1] is True, must be a finite number >= 0"),
        ({"sizes": [1, "2"]}, "sizes[1] is '2', must be a finite number >= 0"),
        ({"sizes": [1, [2]]}, "sizes[1] is [2], must be a finite number >= 0"),
        ({"sizes": [1, None]}, "sizes[1] is None, must be a finite number >= 0"),
        ({"latency_F": [[0, 0]] * 3}, "latency_F has 3 rows, must have 1 (one fewer than stages x chunks)"),
    ],
)
def test_malformed_fields(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_json(json.dumps(GOOD | changes))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON (Expecting value at line 1 column 1)"),
        ('{"stages": 1,\n oops}', "is not JSON (Expecting property name enclosed in double quotes at line 2 column 2)"),
        ("[1]", "must be a JSON object with the fields stages, "),
        ('{"stages": 1, "stages": 2}', "field 'stages' is given more than once"),
        ("[" * 100_000, "is not JSON (nested too deeply)"),
        ('{"stages": ' + "1" * 5000 + "}", "is not JSON (Exceeds the limit"),
    ],
)
def test_text_that_is_no_cost_file(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_json(text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("changes", [{"placement": "x" * 10_000}, {"stages": "x" * 10_000}, {"x" * 10_000: 1}])
def test_an_error_does_not_repeat_a_long_value(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        from_json(json.dumps(GOOD | changes))
    assert len(str(caught.value)) < 300


def test_a_name_that_is_given_twice_is_found_among_many() -> None:
    names = [str(number) for number in range(100_000)]
    text = "{" + ", ".join(f'"{name}": 0' for name in [*names, "99999"]) + "}"
    with pytest.raises(ConfigError, match=r"^field '99999' is given more than once$"):
        from_json(text)


@pytest.mark.parametrize("text", ["[" * 100_000, f"[{10**400}, 1]", "[NaN, 1]", "[1]", "{}", "[true, 1]", ""])
def test_what_is_no_list_of_sizes(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sizes.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"^sizes: {path}: (is not|must be) "):
        read_sizes(path, 2)


def test_all_faults_of_a_file_are_named() -> None:
    rest = {name: value for name, value in GOOD.items() if name != "stages"}
    with pytest.raises(ConfigError) as caught:
        from_json(json.dumps(rest | {"F": [[True]], "B": None, "G": 1}))
    faults = ["field 'G' is unknown", "field stages is missing", "F[0][0] is true", "B must be a list of rows"]
    assert [str(caught.value).count(fault) for fault in faults] == [1] * 4


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    missing, binary, bad = tmp_path / "none" / "a.json", tmp_path / "b.json", tmp_path / "c.json"
    binary.write_bytes(b"\xff\xfe")
    bad.write_text("{}")
    for path, message in (
        (missing, f"{missing}: cannot be read (No such file or directory)"),
        (tmp_path, f"{tmp_path}: cannot be read (Is a directory)"),
        (binary, f"{binary}: is not JSON (not UTF-8 text)"),
        ("a\0b", "path is 'a\\x00b', must be a path"),
        (bad, f"{bad}: fields stages, chunks, placement, microbatches, F, B, latency_F, latency_B are missing"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_costs(path)
        assert str(caught.value) == message
    with pytest.raises(ConfigError, match=r"cannot be written \(No such file or directory\)$"):
        write_costs(missing, make_costs("llm", 1, 1))
    with pytest.raises(ConfigError, match=r"^path is .*, must be a path$"):
        write_costs("a\0b", make_costs("llm", 1, 1))
    wrong: Any = 3
    with pytest.raises(ConfigError, match=r"^path is 3, must be a path$"):
        read_costs(wrong)
    with pytest.raises(ConfigError, match=r"^table is of type int, must be a CostTable$"):
        write_costs(missing, wrong)


def test_a_trace_is_no_cost_file_and_the_error_names_the_command_that_makes_one() -> None:
    with pytest.raises(ConfigError, match=r"^is a trace, must be a cost file: `rrfp costs` makes one of a trace$"):
        from_json('{"traceEvents": []}')
