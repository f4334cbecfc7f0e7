"""The other commands: lists, conformance checks, and what holds for the command line as a whole."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from batches import long
from cli.shell import rrfp, rrfp_process

import rrfp as package

CHECKS = ("check faults", "check admission", "check replay", "check hint", "check transport", "check lane")
COMMANDS = ("demo", "simulate", "sweep", "trace", "costs", "hints", "transports", "doctor", *CHECKS)


class Plain(package.Hint):
    def choose(self, ready: package.ReadySet, view: package.View) -> package.Task | None:
        return ready.first(package.Kind.F)


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
        (("nope",), "No such command 'nope', must be one of: demo, trace"),
        (("--nope",), "No such option: --nope (see rrfp --help)"),
        (
            ("check", "nope"),
            "No such command 'nope', must be one of: faults, admission, replay, hint, transport, lane (se",
        ),
        (("check", "hint"), "Missing argument 'NAME'"),
        (("check", "hint", "nope"), "hint is 'nope', must be one of: bf"),
        (
            ("check", "transport", "nope"),
            "transport is 'nope', must be one of: auto, inproc, shm, zmq, cuda_ipc, collective, simulated",
        ),
        (("check", "transport", "SHM"), "transport is 'SHM' (did you mean 'shm'?), must be one of: auto, inproc, shm"),
        (("check", "lane", "nope"), "lane is 'nope', must be one of: thread, cuda, timer, double, or module:attribute"),
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
from rrfp.commands.app import app
for arguments in (["--help"], ["hints"], ["simulate", "--help"], ["sweep", "--help"]):
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert "torch" not in sys.modules, arguments
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=50, check=False).returncode == 0


def test_bad_input_is_refused_before_torch_is_imported() -> None:
    code = """
import sys
from typer.testing import CliRunner
from rrfp.commands.app import app
for line in (
    "plan missing.json",
    "plan --layers missing.json",
    "advise missing.json",
    "trace missing.json",
    "costs missing.json",
    "simulate --costs missing.json",
    "check replay missing.jsonl",
    "check transport nope",
    "check lane nope",
    "demo --steps 0",
    "demo --hint nope --limit all --transport tcp",
    "demo --transport inproc",
    "demo --hint zb-h1",
    "demo --text missing.txt",
    "demo --out /dev/null/out",
):
    assert CliRunner().invoke(app, line.split()).exit_code == 2, line
    assert "torch" not in sys.modules, line
"""
    subprocess.run([sys.executable, "-c", code], timeout=50, check=True)


def test_reader_that_goes_away_is_no_traceback() -> None:
    command = f"{sys.executable} -m rrfp.cli hints --json | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=50, check=False)
    assert result.stderr == ""


def test_a_closed_output_is_no_traceback() -> None:
    command = f"{sys.executable} -m rrfp.cli hints >&-"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=50, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_an_output_on_a_full_disk_is_a_line() -> None:
    command = f"{sys.executable} -m rrfp.cli hints > /dev/full"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=50, check=False)
    assert result.stderr == "rrfp: the output cannot be written (No space left on device)\n"
    assert result.returncode == 1


INTERRUPTED = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from rrfp.cli import main
main()
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("typer", ("hints",)),
        ("rrfp.commands.doctor", ("hints",)),
        ("numpy", ("sweep", "--profile", "llm")),
        ("torch", ("doctor",)),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_ctrl_c_while_modules_are_imported_is_a_line(module: str, command: tuple[str, ...]) -> None:
    call = [sys.executable, "-c", INTERRUPTED.format(module=module), *command]
    result = subprocess.run(call, capture_output=True, text=True, timeout=50, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "rrfp: interrupted\n")


def test_hints_are_listed_with_origin() -> None:
    known = json.loads(rrfp("hints", "--json").stdout)
    origins = {one["name"]: one["origin"] for one in known}
    built_in = ["bf", "fb", "b-priority", "f-priority", "bfw", "slot-aware", "slot-aware-pyramid", "bfw-pyramid"]
    schedules = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"]
    assert list(origins) == [*built_in, *schedules]
    assert origins == dict.fromkeys(built_in, "built in") | dict.fromkeys(schedules, "schedule")
    assert all(one["description"] and "docstring" not in one["description"] for one in known)
    assert len({one["description"] for one in known}) == len(known)
    assert "BF: after a backward" in rrfp("hints").stdout


def test_transports_are_listed() -> None:
    known = json.loads(rrfp("transports", "--json").stdout)
    assert [(one["name"], one["origin"]) for one in known] == [
        (name, "built in") for name in ("auto", "inproc", "shm", "zmq", "cuda_ipc", "collective", "simulated")
    ]
    assert "inproc" in rrfp("transports").stdout


def test_plugin_that_cannot_be_loaded_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", "no_such_module:Hint", "rrfp.hints")
    monkeypatch.setattr("rrfp.plugins.entry_points", lambda group: [point])
    known = {one["name"]: one for one in json.loads(rrfp("hints", "--json").stdout)}
    assert known["mine"]["description"].startswith("cannot be loaded (ModuleNotFoundError")
    assert known["mine"]["origin"].startswith("plugin")
    assert "bf" in known


def test_a_plugin_without_a_docstring_is_described_by_its_full_name(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", "cli.test_commands:Plain", "rrfp.hints")
    monkeypatch.setattr("rrfp.plugins.entry_points", lambda group: [point])
    known = {one["name"]: one for one in json.loads(rrfp("hints", "--json").stdout)}
    assert known["mine"]["description"] == "cli.test_commands.Plain, which has no docstring"


@pytest.mark.parametrize("statement", ["raise SystemExit(7)", "raise KeyboardInterrupt", "raise GeneratorExit"])
@pytest.mark.parametrize("command", ["hints", "transports"])
def test_a_plugin_that_ends_the_program_when_imported_is_listed_as_not_loadable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, statement: str
) -> None:
    list_plugin(monkeypatch, tmp_path, command, statement)
    result = rrfp(command, "--json")
    known = {one["name"]: one["description"] for one in json.loads(result.stdout)}
    assert known["mine"].startswith(f"cannot be loaded ({statement.removeprefix('raise ').partition('(')[0]}: ")
    assert len(known) > 5
    assert result.exit_code == 0


@pytest.mark.parametrize(("kind", "group"), [("hint", "hints"), ("transport", "transports"), ("lane", "lanes")])
def test_a_plugin_that_ends_the_program_when_imported_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, group: str
) -> None:
    list_plugin(monkeypatch, tmp_path, group, "raise SystemExit(7)")
    result = rrfp("check", kind, "mine")
    assert (result.exit_code, result.stderr) == (2, f"rrfp: {kind} is 'mine': cannot be loaded (SystemExit: 7)\n")


def test_a_plugins_lane_is_checked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", "rrfp.testing.lane_checks.makers:thread_lanes", "rrfp.lanes")
    monkeypatch.setattr("rrfp.plugins.entry_points", lambda group: [point] if group == point.group else [])
    assert rrfp("check", "lane", "mine", "--only", "order").stdout.endswith("lane mine: 1 ok, 0 skipped, 0 failed\n")


def test_a_script_that_exits_when_imported_is_refused_by_name(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")
    result = rrfp("check", "hint", f"{script}:Mine")
    assert result.exit_code == 2
    assert f"cannot import '{script}' (SystemExit: 0)" in result.stderr


def test_ctrl_c_while_a_plugin_is_imported_ends_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    list_plugin(monkeypatch, tmp_path, "hints", "import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    result = rrfp("hints", "--json")
    assert result.stdout == ""
    assert result.exit_code != 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def list_plugin(monkeypatch: pytest.MonkeyPatch, folder: Path, group: str, code: str) -> None:
    """Have plugins of ``group`` be one whose module is ``code``."""
    (folder / "bad_plugin.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    point = EntryPoint("mine", "bad_plugin:Plugin", f"rrfp.{group}")
    monkeypatch.setattr("rrfp.plugins.entry_points", lambda group: [point])


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
    assert (result.exit_code, result.stdout) == (2, "")
    assert "OrderedDict'> must be a factory that is called with (TransportContext): " in result.stderr


@pytest.mark.parametrize("secret", [None, "0123456789abcdef" * 2])
def test_the_check_of_a_transport_gives_it_what_tcp_needs(
    monkeypatch: pytest.MonkeyPatch, secret: str | None, tmp_path: Path
) -> None:
    if secret is not None:
        monkeypatch.setenv("RRFP_SECRET", secret)
    path = tmp_path / "tcp.py"
    path.write_text(
        "from rrfp.transports.zmq.transport import ZmqTransport\n"
        "def over_tcp(context):\n    return ZmqTransport(context, '127.0.0.1')\n"
    )
    chosen = ("--only", "every_field_arrives", "--only", "three_ranks")
    result = rrfp("check", "transport", f"{path}:over_tcp", *chosen, "--json")
    answer = json.loads(result.stdout)
    assert [(check["name"], check["outcome"]) for check in answer["checks"]] == [
        ("every_field_arrives", "ok"),
        ("three_ranks", "ok"),
    ]


def test_a_configuration_that_a_transport_refuses_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RRFP_SECRET", "short")
    result = rrfp("check", "transport", "inproc")
    assert result.exit_code == 2
    assert result.stderr == "rrfp: RRFP_SECRET holds 5 bytes, must hold at least 32; `rrfp secret` makes a secret\n"
    monkeypatch.delenv("RRFP_SECRET")
    path = tmp_path / "refuses.py"
    path.write_text("import rrfp\ndef refuse(context):\n    raise rrfp.ConfigError('PORT is not set')\n")
    result = rrfp("check", "transport", f"{path}:refuse")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "rrfp: PORT is not set\n")


@pytest.mark.parametrize("kind", ["transport", "hint", "lane"])
def test_an_unknown_check_is_refused_with_the_known_ones(kind: str) -> None:
    result = rrfp("check", kind, {"transport": "inproc", "hint": "bf", "lane": "thread"}[kind], "--only", "nope")
    assert result.exit_code == 2
    assert result.stderr.startswith("rrfp: --only is 'nope', must be one of: ")


def test_a_misspelt_check_is_answered_with_the_right_one() -> None:
    result = rrfp("check", "transport", "inproc", "--only", "three_rank")
    assert result.stderr.startswith("rrfp: --only is 'three_rank' (did you mean 'three_ranks'?), must be one of: ")


def test_with_x_the_first_check_that_fails_is_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "cheats.py"
    path.write_text(CHEAT)
    result = rrfp("check", "hint", f"{path}:Crash", "-x")
    assert result.exit_code == 1
    first, summary = result.stdout.splitlines()
    assert first.startswith("FAIL answers_are_ready_and_every_run_ends: KeyError: ")
    assert summary.endswith("0 ok, 0 skipped, 1 failed")


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
from rrfp.lab.device_double import DoubleDevice
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


@pytest.mark.parametrize(("text", "code"), [("expected a message argument", 130), ("anything else", 1)])
def test_ctrl_c_that_python_takes_for_an_error_of_an_import_is_a_line(text: str, code: int) -> None:
    """Of the error that CPython raises then; when it does is a matter of microseconds."""
    raising = INTERRUPTED.replace("os.kill(os.getpid(), signal.SIGINT)", f"raise TypeError({text!r})")
    call = [sys.executable, "-c", raising.format(module="numpy"), "sweep", "--profile", "llm"]
    result = subprocess.run(call, capture_output=True, text=True, timeout=50, check=False)
    assert (result.returncode, result.stdout) == (code, "")
    assert (result.stderr == "rrfp: interrupted\n") == (code == 130)
