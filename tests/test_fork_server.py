"""The server that processes are forked from: it has everything imported, without a thread, and ends with its client."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fork_server as server
import pytest
from fork_server import fork_server

__all__ = ["fork_server"]


def ask(question: Callable[[Connection], None], context: Any = None) -> Any:
    """What a forked process says."""
    context = context or server.context()
    here, there = context.Pipe()
    process = context.Process(target=question, args=(there,))
    process.start()
    there.close()
    said = here.recv()
    process.join(10)
    return said


def name_what_lacks(line: Connection) -> None:
    threads = threading.active_count(), len(list(Path("/proc/self/task").iterdir()))
    line.send(([name for name in server.PRELOADED if name not in sys.modules], threads))


def name_the_server(line: Connection) -> None:
    line.send(os.getppid())


def start_a_server(line: Connection) -> None:
    """In a process of its own, which waits then to be killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([])
    line.send(ask(name_the_server, context))
    signal.pause()


def test_a_forked_process_has_everything_and_one_thread() -> None:
    assert ask(name_what_lacks) == ([], (1, 1))


def test_the_server_ends_with_a_client_that_is_killed() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    client = context.Process(target=start_a_server, args=(there,))
    client.start()
    assert here.poll(20)
    pid = here.recv()
    assert Path(f"/proc/{pid}").exists()
    client.kill()
    client.join()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_script_on_several_ranks_reports_by_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys\n"
        "told = {'rank': int(os.environ['RANK']), 'of': os.environ['WORLD_SIZE'], 'said': sys.argv[1:]}\n"
        "print(json.dumps(told))\n"
    )
    found = server.reports(str(script), "a", "b", ranks=2, timeout_s=20)
    assert found == [{"rank": rank, "of": "2", "said": ["a", "b"]} for rank in range(2)]


@pytest.mark.parametrize("ending", ["raise ValueError('enough')", "sys.exit('enough')"])
def test_a_script_that_fails_is_an_error_with_what_it_printed(tmp_path: Path, ending: str) -> None:
    (tmp_path / "script.py").write_text(f"import os, sys\nif os.environ['RANK'] == '1': {ending}\nprint('well')\n")
    with pytest.raises(AssertionError, match="enough"):
        server.reports(str(tmp_path / "script.py"), ranks=2, timeout_s=20)


def test_a_script_that_never_ends_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import signal\nsignal.pause()\n")
    with pytest.raises(AssertionError, match="-9"):
        server.reports(str(tmp_path / "script.py"), ranks=1, timeout_s=0.2)
