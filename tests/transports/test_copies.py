"""Large copies leave other threads the interpreter."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from rrfp.transports.wire.tensor_bytes import allocate, copy_bytes

NUM_BYTES = 8 << 20
ROUNDS = 200


@pytest.fixture
def only_who_lets_go_is_followed() -> Iterator[None]:
    """No thread takes the interpreter from another one: it runs once that one lets go."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


def lets_others_run(copy: Callable[[memoryview, memoryview], None], rounds: int = ROUNDS) -> bool:
    """Whether another thread runs during some of many copies."""
    target, source = allocate(NUM_BYTES), allocate(NUM_BYTES)
    begun, has_run = threading.Event(), list[bool]()

    def run() -> None:
        begun.wait()
        has_run.append(True)

    other = threading.Thread(target=run)
    other.start()
    begun.set()
    for _ in range(rounds):
        copy(target, source)
        if has_run:
            break
    ran = bool(has_run)
    other.join()
    return ran


def assign(target: memoryview, source: memoryview) -> None:
    """What holds the interpreter."""
    target[:] = source


@pytest.mark.usefixtures("only_who_lets_go_is_followed")
def test_a_copy_lets_other_threads_run() -> None:
    assert lets_others_run(copy_bytes)


@pytest.mark.usefixtures("only_who_lets_go_is_followed")
def test_an_assignment_does_not() -> None:
    """So the test before this one can fail."""
    assert not lets_others_run(assign, rounds=10)


def test_a_copy_is_exact() -> None:
    target = allocate(5)
    copy_bytes(target[1:4], memoryview(b"abc"))
    assert bytes(target[1:4]) == b"abc"
