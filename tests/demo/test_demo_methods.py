"""The demo's readiness-driven rows run the user's hints, limit, split and transport, or say what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.shell import rrfp

from rrfp.errors import ConfigError
from rrfp.lab.demo.settings import METHODS, DemoMethod, DemoSettings, demo_methods
from rrfp.lab.report import library

PLUGINS = """
from rrfp import Hint
from rrfp.transports.zmq.transport import ZmqTransport

class First(Hint):
    def choose(self, ready, view):
        return next(iter(ready))

class Counted(ZmqTransport):
    pass
"""


def test_without_options_the_methods_are_the_demos() -> None:
    assert DemoSettings(out="unused").methods == METHODS


def test_options_apply_to_the_readiness_driven_rows_alone() -> None:
    methods = demo_methods(None, "n", True)
    assert {name: methods[name] for name in ("1f1b", "zb-h1")} == {name: METHODS[name] for name in ("1f1b", "zb-h1")}
    driven = [method for method in methods.values() if method.hint is not None]
    assert [method.hint for method in driven] == ["bf", "b-priority", "bfw", *["slot-aware-pyramid"] * 2]
    assert all(method.limit == "n" and method.split for method in driven)


def test_the_row_of_the_v_keeps_its_own_limit_as_others_would_be_refused() -> None:
    settings = DemoSettings(out="unused", limit="1f1b")
    assert settings.methods["slot-aware"].limit == "1f1b"
    assert (settings.methods["v"].limit, settings.methods["v"].graph(4).placement.layout) == ("n", "v")


def test_rows_of_hints_are_named_so_that_files_can_be() -> None:
    methods = demo_methods("bf, 1f1b,a/b.py:Mine,pkg.mod:Other", None, None)
    assert list(methods) == ["1f1b", "zb-h1", "bf", "1f1b-hint", "Mine", "Other"]
    assert methods["1f1b-hint"] == DemoMethod(hint="1f1b")
    assert methods["Mine"] == DemoMethod(hint="a/b.py:Mine")


WRONG = [
    ({"hint": "nope", "limit": "all", "transport": "tcp"}, ["hint is 'nope'", "limit is 'all'", "transport is 'tcp'"]),
    ({"stages": 9, "steps": 0, "hint": "json:nope"}, ["stages is 9", "steps is 0", "'json' has no attribute 'nope'"]),
    (
        {"hint": "zb-h1"},
        ["schedule zb-h1 takes 1 chunk a stage, split backward; the graph has unsplit backward (--split splits it)"],
    ),
    ({"hint": "bf,no/such.py:X"}, ["cannot import 'no/such.py'"]),
    ({"hint": "a:X,b:X"}, ["hint is 'a:X,b:X', must give each hint another name than 'X'"]),
    ({"transport": "inproc"}, ["transport is 'inproc', must connect processes, as auto, shm and zmq do"]),
    ({"transport": "simulated"}, ["transport is 'simulated', must connect processes"]),
    ({"transport": "collective"}, ["transport is 'collective', must be one without plain tcp"]),
]


@pytest.mark.parametrize(("options", "messages"), WRONG, ids=str)
def test_wrong_options_are_all_named_before_a_process_starts(
    options: dict[str, str | int], messages: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        DemoSettings(out="unused", **options)  # type: ignore[arg-type]
    assert all(str(caught.value).count(message) == 1 for message in messages)
    line = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    result = rrfp("demo", "--out", tmp_path / "out", *line)
    lines = [f"rrfp: {fault}\n" for fault in caught.value.faults or (caught.value,)]
    assert (result.exit_code, result.stderr) == (2, "".join(lines))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.long
def test_a_run_with_plugins_and_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small run: a hint and a transport from files, no picture, a line a step, and a table of 60 columns."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setenv("COLUMNS", "60")
    (tmp_path / "mine.py").write_text(PLUGINS)
    chosen = ("--hint", f"{tmp_path}/mine.py:First", "--transport", f"{tmp_path}/mine.py:Counted", "--limit", "n")
    small = ("--stages", "2", "--microbatches", "4", "--warm-up", "0", "--steps", "1", "--split")
    result = rrfp("demo", "--out", tmp_path / "out", *small, *chosen)
    assert result.exit_code == 0, result.stderr
    pages = {"report.html"} if library.PACKAGE.exists() else set()
    no_picture, *no_page, starting, step = result.stderr.splitlines()
    assert len(no_page) == 1 - len(pages)
    assert no_picture == "timeline.png is left out: a timeline needs matplotlib: pip install 'rrfp[plot]'"
    assert starting == "starting 2 processes: 3 methods take turns for 1 steps each"
    assert step.startswith("step 1 of 1: 1f1b ")
    written = {"summary.json", "workers.log", "trace-1f1b.json", "trace-zb-h1.json", "trace-First.json"} | pages
    assert {path.name for path in (tmp_path / "out").iterdir()} == written
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["settings"]["limit"] == "n"
    assert max(summary["methods"]["First"]["peak_held"]) <= 2
    trace = json.loads((tmp_path / "out" / "trace-First.json").read_text())
    assert (trace["otherData"]["job"]["limit"], trace["otherData"]["job"]["strict"]) == ("n", None)
    events = trace["traceEvents"]
    assert any(event["name"].startswith("W") for event in events if event.get("cat") == "computation")
    assert "…" not in result.stdout
    words = result.stdout.split()
    assert all(head in words for head in ("median", "spread", "speed-up", "bound", "blocked", "held"))
