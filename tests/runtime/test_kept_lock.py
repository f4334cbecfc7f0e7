"""The process that watches for calls which keep the interpreter's lock: whose it is, and that it ends.

That it prints, and when not, is in test_stuck_processes.py and test_suspended.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rrfp.runtime.stall import kept_lock
from rrfp.runtime.stall.kept_lock import LockWatch

#: What a program begins with; the module needs nothing but the standard library, so an interpreter starts at once.
HEAD = (
    f"PATH = {kept_lock.__file__!r}"
    + """
import os, signal, sys, threading, time
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("kept_lock", PATH)
kept_lock = sys.modules["kept_lock"] = module_from_spec(spec)
spec.loader.exec_module(kept_lock)
LockWatch = kept_lock.LockWatch
def links():
    paths = [f"/proc/self/fd/{number}" for number in range(100)]
    return {os.readlink(path) for path in paths if os.path.lexists(path)}
def children():
    with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
        return [int(pid) for pid in file.read().split()]
"""
)


def started(program: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", "-W", "error", "-c", HEAD + program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(program: str) -> tuple[str, str]:
    """What a program prints, to both streams."""
    with started(program) as process:
        return process.communicate(timeout=20)


def works(watch: LockWatch) -> bool:
    """Whether it has started a process."""
    return watch._process is not None


def test_of_several_in_a_process_one_works_and_the_next_takes_over() -> None:
    first, second = LockWatch("stage 0", 60.0, 60.0), LockWatch("stage 0", 60.0, 60.0)
    first.beat(threading.get_ident())
    second.beat(threading.get_ident())
    assert (works(first), works(second)) == (True, False)
    number = kept_lock._shared.handler()[0]
    first.close()
    first.close()
    second.beat(threading.get_ident())
    assert (works(first), works(second)) == (False, True)
    assert kept_lock._shared.handler()[0] == number
    second.close()
    assert not works(second)


def test_a_forked_child_has_one_of_its_own_and_leaves_its_parents_alone() -> None:
    """As a worker that itself trains; nothing warns, and the child keeps no way to its parent's."""
    out, errors = ended("""
watch = LockWatch("parent", 0.1, 60.0)
watch.beat(0)
[ours] = children()
sockets = {os.readlink(f"/proc/self/fd/{watch._beats.fileno()}")}
assert sockets <= links()
if not os.fork():
    import gc
    gc.collect()
    assert watch._process is None and children() == []
    assert not sockets & links()
    own = LockWatch("child", 0.1, 60.0)
    own.beat(0)
    assert len(children()) == 1 and children() != [ours]
    own.close()
    print("child", flush=True)
    os._exit(0)
os.wait()
watch.beat(0)
assert children() == [ours]
watch.close()
assert children() == []
print("parent")
""")
    assert (out, errors) == ("child\nparent\n", "")


def test_it_ends_with_its_process_also_if_a_child_keeps_the_connection() -> None:
    """A child that was forked without Python's knowledge, by a library of C, holds all descriptors."""
    with started("""
import ctypes
watch = LockWatch("stage 0", 0.1, 60.0)
watch.beat(0)
if not ctypes.PyDLL(None).fork():
    time.sleep(30)
    os._exit(0)
print(*children(), flush=True)
time.sleep(60)
""") as process:
        assert process.stdout is not None
        second, child = map(int, process.stdout.readline().split())
        try:
            process.kill()
            until = time.monotonic() + 10
            while Path(f"/proc/{second}/cmdline").exists() and Path(f"/proc/{second}/cmdline").read_bytes():
                assert time.monotonic() < until, "it still runs"
                time.sleep(0.01)
        finally:
            os.kill(child, signal.SIGKILL)


def test_signals_that_the_program_uses_are_left_alone() -> None:
    out, errors = ended("""
import faulthandler
signal.signal(signal.SIGRTMAX, signal.SIG_IGN)
faulthandler.register(signal.SIGRTMAX - 1, file=1)
assert kept_lock._shared.handler()[0] == signal.SIGRTMAX - 2
for number in range(signal.SIGRTMIN, signal.SIGRTMAX):
    signal.signal(number, signal.SIG_IGN)
kept_lock._shared.forget()
try:
    LockWatch("stage 0", 0.1, 60.0).beat(0)
except OSError as error:
    print(error)
""")
    assert (out, errors) == ("every real-time signal is in use\n", "")


def test_a_system_that_does_not_tell_which_signals_are_in_use_is_a_reason(tmp_path: Path) -> None:
    """As a sandbox whose /proc has only some of Linux's fields."""
    (tmp_path / "status").write_text("Name:\tpython\nThreads:\t1\n")
    out, errors = ended(f"""
kept_lock.Path = lambda path: __import__("pathlib").Path({str(tmp_path / "status")!r})
try:
    LockWatch("stage 0", 0.1, 60.0).beat(0)
except OSError as error:
    print(error)
""")
    assert (out, errors) == ("/proc does not say which signals are in use\n", "")


def test_a_call_that_the_signal_cuts_short_is_reported_and_the_program_goes_on() -> None:
    out, errors = ended("""
import ctypes
watch = LockWatch("stage 0", 0.05, 0.2)
def beat():
    while True:
        watch.beat(threading.main_thread().ident)
        time.sleep(0.05)
threading.Thread(target=beat, daemon=True).start()
time.sleep(0.5)
def keep_the_lock():
    ctypes.PyDLL(None).usleep(20_000_000)  # until the signal, which cuts it short
keep_the_lock()
time.sleep(1.0)
print("goes on", flush=True)
""")
    assert out == "goes on\n"
    assert errors.startswith("stage 0 (pid ")
    assert 'thread MainThread:\n  File "<string>"' in errors
    assert "in keep_the_lock" in errors


def test_a_beat_that_is_not_late_is_waited_for_and_does_not_count_as_missed() -> None:
    """The next one is due in a second, and 1.6 s without any are too many; it ends after half a second."""
    out, errors = ended("""
watch = LockWatch("stage 0", 1.0, 1.6)
watch.beat(0)
for _ in range(50):
    time.sleep(0.01)  # this thread runs every now and then
watch.close()
print("ends")
""")
    assert (out, errors) == ("ends\n", "")


def test_on_another_system_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    watch = LockWatch("stage 0", 1.0, 1.0)
    with pytest.raises(OSError, match="not known how on darwin"):
        watch.beat(0)
    watch.close()
