"""The other commands: lists, conformance checks, and what holds for the command line as a whole."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from batches import long
from cli.shell import rrfp, rrfp_process

import rrfp as package

CHECKS = ("check faults", "check admission", "check hint", "check transport", "check lane")
COMMANDS = ("demo", "simulate", "sweep", "trace", "costs", "hints", "transports", "doctor", *CHECKS)

CHEAT = """
from rrfp import Hint, Kind, Task

class Cheat(Hint):
    def choose(self, ready, view):
        return Task(Kind.B, 0, view.stage)

class Crash(Hint):
    def choose(self, ready, view):
        raise KeyError("oops")

class First(Hint):
    def choose(self, ready, view):
        return next(iter(ready))
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command: str) -> None:
    result = rrfp(*command.split(), "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_version() -> None:
    result = rrfp("--version")
    assert (result.exit_code, result.stdout) == (0, f"rrfp {package.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope",), "No such command 'nope', must be one of: demo, simulate"),
        (("--nope",), "No such option: --nope (see rrfp --help)"),
        (("check", "nope"), "No such command 'nope', must be one of: faults, admission, hint, transport, lane (se"),
        (("check", "hint"), "Missing argument 'NAME'"),
        (("check", "hint", "nope"), "hint is 'nope', must be one of: bf"),
        (
            ("check", "transport", "nope"),
            "transport is 'nope', must be one of: auto, inproc, shm, zmq, cuda_ipc, collective, simulated",
        ),
        (("check", "lane", "nope"), "lane is 'nope', must be one of: thread, timer, double, cuda, or module:attribute"),
        (("check", "lane", "math:pi"), "lane is 3.141592653589793, must be a factory: lane(stage)"),
        (("trace",), "Missing argument 'FILE...'"),
    ],
)
def test_bad_usage_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = rrfp(*arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"rrfp: {message}")


def test_light_commands_do_not_import_torch() -> None:
    code = """
import sys
from typer.testing import CliRunner
from rrfp.cli import app
for arguments in (["--help"], ["hints"], ["simulate", "--help"], ["sweep", "--help"]):
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert "torch" not in sys.modules, arguments
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=50, check=False).returncode == 0


def test_reader_that_goes_away_is_no_traceback() -> None:
    command = f"{sys.executable} -m rrfp.cli hints --json | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=50, check=False)
    assert result.stderr == ""


def test_hints_are_listed_with_origin() -> None:
    known = json.loads(rrfp("hints", "--json").stdout)
    origins = {one["name"]: one["origin"] for one in known}
    built_in = ["bf", "fb", "b-priority", "f-priority", "bfw", "slot-aware", "slot-aware-pyramid", "bfw-pyramid"]
    schedules = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"]
    assert list(origins) == [*built_in, *schedules]
    assert origins == dict.fromkeys(built_in, "built in") | dict.fromkeys(schedules, "schedule")
    assert all(one["description"] and "docstring" not in one["description"] for one in known)
    assert "BF: after a backward" in rrfp("hints").stdout


def test_transports_are_listed() -> None:
    known = json.loads(rrfp("transports", "--json").stdout)
    assert [(one["name"], one["origin"]) for one in known] == [
        (name, "built in") for name in ("auto", "inproc", "shm", "zmq", "cuda_ipc", "collective", "simulated")
    ]
    assert "inproc" in rrfp("transports").stdout


def test_plugin_that_cannot_be_loaded_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", "no_such_module:Hint", "rrfp.hints")
    monkeypatch.setattr("rrfp.core.registry.entry_points", lambda group: [point])
    known = {one["name"]: one for one in json.loads(rrfp("hints", "--json").stdout)}
    assert known["mine"]["description"].startswith("cannot be loaded (ModuleNotFoundError")
    assert known["mine"]["origin"].startswith("plugin")
    assert "bf" in known


@pytest.mark.parametrize("name", ["bf", "1f1b"])
def test_check_of_a_good_hint(name: str) -> None:
    result = rrfp("check", "hint", name)
    assert result.exit_code == 0
    *lines, summary = result.stdout.splitlines()
    assert all(line.startswith("ok   ") for line in lines)
    assert summary == f"hint {name}: {len(lines)} ok, 0 skipped, 0 failed"


def test_check_of_a_hint_outside_the_package(tmp_path: Path) -> None:
    path = tmp_path / "cheats.py"
    path.write_text(CHEAT)
    assert rrfp("check", "hint", f"{path}:First").exit_code == 0
    result = rrfp_process("check", "hint", "cheats:Cheat", "--json", cwd=tmp_path)
    assert result.returncode == 1
    answer = json.loads(result.stdout)
    assert (answer["kind"], answer["name"], answer["ok"]) == ("hint", "cheats:Cheat", False)
    assert any("Cheat chose B0@" in check["message"] for check in answer["checks"] if check["outcome"] == "failed")
    crashed = rrfp("check", "hint", f"{path}:Crash")
    assert crashed.exit_code == 1
    (first, *_) = crashed.stdout.splitlines()
    line = next(n for n, text in enumerate(CHEAT.splitlines(), 1) if "KeyError" in text)
    assert first.startswith("FAIL answers_are_ready_and_every_run_ends: KeyError: ")
    assert first.endswith(f" (at {path}:{line}, in choose)")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [long("inproc"), long("zmq"), long("simulated"), "rrfp.transports.inproc:InprocTransport"]
)
def test_check_of_a_transport(name: str) -> None:
    result = rrfp_process("check", "transport", name, "--json")
    answer = json.loads(result.stdout)
    skipped = {check["name"]: check["message"] for check in answer["checks"] if check["outcome"] != "ok"}
    assert {check["outcome"] for check in answer["checks"]} == {"ok", "skipped"}
    no_inject = "the pair has no `inject` to send bad frames"
    assert skipped == {
        "silent_peer": "the pair has no `silence` to stop a peer from answering",
        "bad_frames": no_inject,
        **({"bad_frames_directly": no_inject} if name == "zmq" else {}),  # which passes messages on where it reads them
    }
    assert (result.returncode, answer["ok"]) == (0, True)


def test_check_of_something_that_is_no_transport() -> None:
    result = rrfp("check", "transport", "collections:OrderedDict", "--json")
    assert result.exit_code == 1
    assert not json.loads(result.stdout)["ok"]


@pytest.mark.allow_blocking(reason="a check of offers keeps the loop from running")
@pytest.mark.parametrize("name", ["thread", "timer", "double"])
def test_check_of_a_lane(name: str) -> None:
    result = rrfp("check", "lane", name, "--json")
    answer = json.loads(result.stdout)
    names = [check["name"] for check in answer["checks"]]
    assert (result.exit_code, answer["kind"], answer["ok"]) == (0, "lane", True)
    assert "order (depth 3)" in names if name == "double" else "order" in names
    skipped = {check["message"] for check in answer["checks"] if check["outcome"] == "skipped"}
    assert skipped <= {
        "a device that runs work after the call has returned",
        "calls on a thread of their own",
        "a depth of 2 or more",
        "room for an offered call",
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_check_of_the_lane_of_a_gpu_says_that_there_is_none() -> None:
    result = rrfp("check", "lane", "cuda")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "rrfp: lane is 'cuda', but torch finds no CUDA device here; 'double' needs none\n"


WRONG_LANE = """
from rrfp.compute.lanes.stream import StreamLane
from rrfp.compute.lanes.thread import ThreadLane
from rrfp.testing.device_double import DoubleDevice
from rrfp.testing.lane_checks import Subject

def good(stage):
    return ThreadLane()

class Unfenced(StreamLane):
    def fence(self):
        pass

def unfenced(stage):
    device = DoubleDevice(0.03)
    return Subject(Unfenced(device), device=device, problems=lambda: device.problems)

def none(stage):
    return None
"""


@pytest.mark.allow_blocking(reason="a check of offers keeps the loop from running")
def test_check_of_lanes_outside_the_package(tmp_path: Path) -> None:
    path = tmp_path / "lanes.py"
    path.write_text(WRONG_LANE)
    assert rrfp("check", "lane", f"{path}:good").exit_code == 0
    result = rrfp("check", "lane", f"{path}:unfenced")
    assert result.exit_code == 1
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAIL")]
    assert failed == ["FAIL fence: a call ran before work that its caller had issued before fence"]
    assert "the factory returned None, must return a Lane or a Subject" in rrfp("check", "lane", f"{path}:none").stdout
