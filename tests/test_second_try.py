"""A test that failed while the machine stood still runs again; any other failure counts."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from second_try import PROPERTY

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="the machine is watched on Linux only"),
]

TESTS = Path(__file__).parent

#: A watch that is stopped for half a second cannot tell this from a machine that stood still.
SAMPLE = """
import os, signal, time
from pathlib import Path
import pytest

TRIES = Path(__file__).with_name("tries")

def count(name):
    file = TRIES.with_name(name)
    file.write_text(str(number := int(file.read_text()) + 1 if file.exists() else 1))
    return number

def stand_still():
    watch = watch_of(os.getpid())
    os.kill(watch, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(watch, signal.SIGCONT)

def watch_of(parent):
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = int(status.parent.name), status.read_text().rpartition(")")[2].split()
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(rest[1]) == parent and b"standstill.py" in command:
            return pid

@pytest.fixture(scope="module")
def shared():
    if count("fixture") == 1:
        stand_still()
        raise RuntimeError("slow to start")
    return 1

def test_first():
    pass

# Before the others: a watch may report the end of a standstill late, while the next test runs.
def test_wrong():
    count("wrong")
    assert False

def test_late_once():
    if count("once") == 1:
        stand_still()
        assert False

def test_late_in_a_shared_fixture(shared):
    assert shared

def test_late_always():
    count("always")
    stand_still()
    assert False

@pytest.mark.timeout(3)
def test_endless_the_second_time():
    if count("endless") == 1:
        stand_still()
        assert False
    time.sleep(3600)
"""


def test_only_failures_during_a_standstill_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "conftest.py").write_text("from second_try import register as pytest_configure\n")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS}\n")
    report = tmp_path / "report.xml"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", f"--junit-xml={report}", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    outcomes = {
        case.get("name"): not list(case.iter("failure")) and not list(case.iter("error"))
        for case in ElementTree.parse(report).iter("testcase")
    }
    assert outcomes == {
        "test_first": True,
        "test_late_once": True,
        "test_late_in_a_shared_fixture": True,
        "test_late_always": False,
        "test_endless_the_second_time": False,
        "test_wrong": False,
    }, run.stdout
    tries = {name: int((tmp_path / name).read_text()) for name in ("once", "fixture", "always", "endless", "wrong")}
    assert tries == {"once": 2, "fixture": 2, "always": 3, "endless": 2, "wrong": 1}
    listed = run.stdout.partition(PROPERTY)[2]
    again = {line.partition(": ")[0].partition("::")[2] for line in listed.splitlines() if line.endswith(" s")}
    assert again == {
        "test_late_once",
        "test_late_in_a_shared_fixture",
        "test_late_always",
        "test_endless_the_second_time",
    }, run.stdout
