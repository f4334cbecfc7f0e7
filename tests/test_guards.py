"""The guards of conftest.py fire, and stay silent where nothing is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)  # the first test waits for a whole pytest run

TESTS = Path(__file__).parent

SAMPLE = """
import asyncio, concurrent.futures, gc, multiprocessing, os, queue, socket, subprocess, sys, threading, time
import pytest, torch, uvloop, zmq, zmq.asyncio
from time import sleep


# --- must fail, naming what blocked
async def test_bad_sleep():
    time.sleep(0.001)

async def test_bad_imported_sleep():
    sleep(0.001)

def test_bad_sleep_on_a_loop_in_a_thread():
    async def main():
        time.sleep(0.001)
    thread = threading.Thread(target=lambda: asyncio.run(main()), name="runtime")
    thread.start()
    thread.join()

def test_bad_sleep_on_uvloop():
    async def main():
        time.sleep(0.001)
    uvloop.run(main())

async def test_bad_queue():
    with pytest.raises(queue.Empty):
        queue.Queue().get(timeout=0.001)

async def test_bad_event():
    threading.Event().wait(0.001)

async def test_bad_future():
    with pytest.raises(concurrent.futures.TimeoutError):
        concurrent.futures.Future().result(0.001)

async def test_bad_join():
    thread = threading.Thread(target=sleep, args=(0.05,))
    thread.start()
    thread.join()

async def test_bad_socket():
    left, right = socket.socketpair()
    with left, right:
        left.send(b"x")
        right.recv(1)

async def test_bad_subprocess():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(0.2)"])

async def test_bad_zmq():
    with zmq.Context() as context, context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        left.bind("inproc://x")
        right.connect("inproc://x")
        left.send(b"x")
        right.recv()

async def test_bad_store():
    store = torch.distributed.HashStore()
    store.set("key", "x")
    store.get("key")

async def test_bad_store_made():
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)

async def test_bad_work():
    until = time.thread_time() + 0.7
    while time.thread_time() < until:
        pass

def test_bad_thread_left():
    threading.Thread(target=sleep, args=(2,), daemon=True, name="straggler").start()

def test_bad_child_left():
    test_bad_child_left.kept = subprocess.Popen(["sleep", "97"])

def test_bad_orphan_left():
    subprocess.run(["sh", "-c", "sleep 98 & exit 0"], stdout=subprocess.DEVNULL)

def test_bad_forked_child_left():
    test_bad_forked_child_left.kept = process = multiprocessing.get_context("fork").Process(target=sleep, args=(99,))
    process.start()


# --- must pass
async def test_good_awaits():
    await asyncio.sleep(0.001)
    await asyncio.to_thread(sleep, 0.001)
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    left, right = await asyncio.open_connection(sock=await connected())
    right.close()
    await right.wait_closed()

async def connected():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, server.sockets[0].getsockname())
    await asyncio.sleep(0.01)
    server.close()
    return sock

async def test_good_zmq():
    with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        left.bind("inproc://x")
        right.connect("inproc://x")
        await left.send_multipart([b"x", b"y"])
        assert await right.recv_multipart() == [b"x", b"y"]
        assert await left.poll(1) == 0

async def test_good_nothing_to_wait_for():
    queue.Queue().put(1)
    event = threading.Event()
    event.set()
    event.wait()
    future = concurrent.futures.Future()
    future.set_result(1)
    future.result()
    time.sleep(0)

def test_good_uvloop():
    async def main():
        await asyncio.to_thread(sleep, 0.001)
    uvloop.run(main())

def test_good_off_the_loop():
    time.sleep(0.001)
    subprocess.run(["true"])
    with pytest.raises(queue.Empty):
        queue.Queue().get(timeout=0.001)

def test_good_thread_that_is_ending():
    threading.Thread(target=sleep, args=(0.1,)).start()

async def test_good_collection():
    gc.collect()

@pytest.mark.allow_blocking("the point of this test")
async def test_good_marked():
    time.sleep(0.001)
"""

#: Four tests leave something behind: they need not be given the time that real stragglers get.
SHORT_GRACE = "\nimport leak_guard\nleak_guard.GRACE_S = 0.5\n"

EXPECTED = {
    "test_bad_sleep": "time.sleep blocks",
    "test_bad_imported_sleep": "time.sleep blocks",
    "test_bad_sleep_on_a_loop_in_a_thread": "time.sleep blocks on the event loop of thread 'runtime'",
    "test_bad_sleep_on_uvloop": "time.sleep blocks",
    "test_bad_queue": "Condition.wait blocks",
    "test_bad_event": "Condition.wait blocks",
    "test_bad_future": "Condition.wait blocks",
    "test_bad_join": "Thread.join blocks",
    "test_bad_socket": "socket.recv blocks",
    "test_bad_subprocess": "Popen.wait blocks",
    "test_bad_zmq": "Socket.recv blocks",
    "test_bad_store": "Store.get blocks",
    "test_bad_store_made": "TCPStore.__init__ blocks",
    "test_bad_work": "of CPU on the event loop",
    "test_bad_thread_left": "left behind: thread 'straggler'",
    "test_bad_child_left": "sleep 97",
    "test_bad_orphan_left": "sleep 98",
    "test_bad_forked_child_left": "left behind: process",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One pytest run over SAMPLE under the same conftest: by test, what the guards said ("" = the test passed)."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "test_sample.py").write_text(SAMPLE)
    (folder / "conftest.py").write_text((TESTS / "conftest.py").read_text() + SHORT_GRACE)
    (folder / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {TESTS}\nasyncio_mode = auto\nfilterwarnings =\n    ignore::ResourceWarning\n"
        "markers =\n    allow_blocking\n    gpu\n"
    )
    report = folder / "report.xml"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", f"--junit-xml={report}", str(folder)],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert report.exists(), run.stdout + run.stderr
    said: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        messages = [(child.get("message") or "") + (child.text or "") for child in case]
        said[case.get("name", "")] = said.get(case.get("name", ""), "") + "\n".join(messages)
    return said


@pytest.mark.parametrize("name", EXPECTED)
def test_guard_names_the_culprit(name: str, outcomes: dict[str, str]) -> None:
    assert EXPECTED[name] in outcomes[name]


def test_guards_are_silent_on_good_tests(outcomes: dict[str, str]) -> None:
    good = {name: said for name, said in outcomes.items() if name not in EXPECTED}
    assert len(good) == SAMPLE.count("def test_good_")
    assert not any(good.values()), good
