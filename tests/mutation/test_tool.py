"""The mutation check's own parts, in seconds; `make mutation`, or `make test-long`, runs it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutation.check import TREE, main
from mutation.coverage_map import PACKAGES, TESTS, CoverageMap
from mutation.draw import as_entry, draw, known_survivors, mutants_of
from mutation.named import NAMED
from mutation.operators import changes

SOURCE = '''
class Counter:
    """Counts: n < 3 and so on."""

    most: int = 3

    def add(self, n: int) -> int:
        """Docstrings stay: 1 + 1."""
        assert n > 0
        if n >= self.most and not self.full:
            raise ValueError(f"{n + 1} is too much")
        local = min(n, 4)
        self.total += local
        return self.total
'''


def texts(operator: str) -> list[str]:
    return [f"{one.old} -> {one.new}" for one in changes(SOURCE) if one.operator == operator]


def test_each_operator_changes_what_runs_and_no_word_or_assertion() -> None:
    assert texts("comparison") == ["n >= self.most -> (n > self.most)"]
    assert texts("boolean") == [
        "n >= self.most and not self.full -> (n >= self.most or not self.full)",
        "not self.full -> (self.full)",
    ]
    assert texts("constant") == ["3 -> (4)", "4 -> (5)"]
    assert texts("arithmetic") == ["self.total += local -> self.total -= local"]
    assert texts("call") == ["min(n, 4) -> (max(n, 4))"]
    assert texts("return") == ["return self.total -> return None"]
    assert texts("negated condition") == [
        "n >= self.most and not self.full -> (not (n >= self.most and (not self.full)))"
    ]
    assert [text.split(" ->")[0].split("(")[0] for text in texts("removed statement")] == [
        "raise ValueError",
        "self.total += local",
    ]


def test_a_change_touches_its_text_alone_and_leaves_python() -> None:
    for change in changes(SOURCE):
        after = change.applied(SOURCE)
        ast.parse(after)
        assert after != SOURCE
        assert after[: change.span[0]] == SOURCE[: change.span[0]]
        assert SOURCE.count("\n", 0, change.span[0]) + 1 == change.line


def test_columns_count_characters_beyond_ascii() -> None:
    (change,) = [one for one in changes('def f():\n    return "äöü", 1\n') if one.operator == "constant"]
    assert change.applied('def f():\n    return "äöü", 1\n') == 'def f():\n    return "äöü", (2)\n'


def test_every_named_mutant_still_has_its_text_and_its_guards() -> None:
    assert len(NAMED) == len({named.name for named in NAMED}) == 31
    for named in NAMED:
        source = (TREE / named.file).read_text()
        ast.parse(named.applied(source))
        assert named.guards
        for program, *words in named.guards:
            assert program in ("pytest", "rrfp")
            assert program == "rrfp" or all((TREE / word.split("::")[0]).exists() for word in words), named.name
    with pytest.raises(ValueError, match="must have it once"):
        NAMED[0].applied("")


def test_a_draw_is_the_same_for_the_same_seed_and_moves_little_with_the_code() -> None:
    mutants = [*mutants_of(TREE, PACKAGES)]
    assert len({mutant.key for mutant in mutants}) == len(mutants) > 2000
    drawn = draw(mutants, 0, 300)
    assert drawn == draw(list(reversed(mutants)), 0, 300)
    assert drawn != draw(mutants, 1, 300)
    kept = {mutant.key for mutant in drawn} & {mutant.key for mutant in draw(mutants[50:], 0, 300)}
    assert len(kept) > 280


def test_every_listed_survivor_is_still_a_change_to_the_code() -> None:
    listed = known_survivors()
    files = sorted({file for file, *_ in listed})
    assert {*listed} <= {mutant.key for file in files for mutant in mutants_of(TREE, [file])}


def test_the_list_of_survivors_is_read_and_each_has_a_reason(tmp_path: Path) -> None:
    assert all(known_survivors().values())
    path = tmp_path / "survivors.toml"
    mutant = next(mutants_of(TREE, PACKAGES))
    path.write_text(as_entry(mutant))
    with pytest.raises(ValueError, match="an entry needs"):
        known_survivors(path)
    path.write_text(as_entry(mutant).replace('reason = ""', 'reason = "equivalent"'))
    assert known_survivors(path) == {mutant.key: "equivalent"}


def test_the_quickest_tests_of_a_line_are_asked_first_and_those_of_the_file_where_only_importing_runs_it() -> None:
    told = CoverageMap({"a": 2.0, "b": 0.1, "c": 50.0}, {"x.py": {1: [], 2: ["a", "b", "c"], 3: ["a"]}})
    assert told.tests("x.py", range(2, 3)) == ["b", "a"]
    assert told.tests("x.py", range(3, 4)) == ["a"]
    assert told.tests("x.py", range(1, 2)) == ["b", "a"]
    assert told.tests("y.py", range(1, 2)) == []
    named = CoverageMap({"tests/test_x.py::a": 2.0, "b": 0.1, "c": 0.2}, {"rrfp/x.py": {1: ["b"]}})
    assert named.tests("rrfp/x.py", range(1, 2)) == ["tests/test_x.py::a", "b"], "the file's own tests first"
    imported = CoverageMap({"a": 2.0, "b": 0.1}, {"x.py": {1: []}})
    assert imported.tests("x.py", range(1, 2)) == ["b", "a"]


def test_the_tests_that_are_asked_exist() -> None:
    assert [test for test in TESTS if not (TREE / test).exists()] == []


@pytest.mark.long
def test_a_mutant_is_killed_by_its_guard(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--named-only", "--only", "two", "--workers", "1"]) == 0  # none is called so
    assert main(["--named-only", "--only", "one poll", "--workers", "1"]) == 0
    assert "killed: one poll is enough: pytest tests/runtime/test_status.py" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_the_named_mutants_are_killed_and_of_the_drawn_ones_only_listed_ones_survive() -> None:
    assert main([]) == 0
