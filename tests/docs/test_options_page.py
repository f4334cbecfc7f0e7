"""docs/reference/options.md: its table is that of the options."""

from __future__ import annotations

import re

from installed import ROOT

from rrfp.hints.registry import DEFAULT_HINT
from rrfp.pipeline.options import option_table

PAGE = (ROOT / "docs" / "reference" / "options.md").read_text()
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\| `.*$", PAGE, re.MULTILINE)]


def test_every_option_has_its_default_and_whether_all_ranks_must_agree() -> None:
    shown = {name.strip("`"): (default.split("`")[1], common == "yes") for name, _, default, _, _, common in ROWS}
    assert shown == {name: (repr(option.default), option.is_common) for name, option in option_table().items()}
    assert len(ROWS) == len(shown)


def test_every_option_has_a_meaning() -> None:
    assert all(meaning for _, meaning, *_ in ROWS)


def test_the_allowed_values_are_those_that_an_error_names() -> None:
    allowed = {name.strip("`"): values for name, _, _, _, values, _ in ROWS}
    assert all(allowed.values())
    for name, option in option_table().items():
        if isinstance(option.wanted, str) and option.wanted:
            assert allowed[name] == option.wanted


def test_times_and_sizes_have_a_unit() -> None:
    units = {name.strip("`"): unit for name, _, _, unit, _, _ in ROWS}
    for name, option in option_table().items():
        if name.endswith("bytes") or option.wanted == "a finite number above 0":
            assert units[name] in ("seconds", "bytes"), name


def test_the_defaults_that_depend_on_each_other_are_named() -> None:
    assert f"the hint is `{DEFAULT_HINT}`, and with no `limit` the limit is `2n`" in PAGE
