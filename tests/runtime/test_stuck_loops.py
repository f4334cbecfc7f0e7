"""A rank whose event loop does not run is named by all others, and prints where it is."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from runtime.ranks import ThreadedRanks, step
from runtime.stuck_hints import RELEASE, Blocks, BlocksAtOnce
from runtime.toys import data, loss_fn, stages

import rrfp
from rrfp import timeouts
from rrfp.errors import PipelineAborted
from rrfp.runtime.stall.loop_watchdog import LoopWatchdog

BATCH = data(4)
STALL_S = 0.3

#: Longer than the loop of a rank that is not stuck may stand still on a busy machine.
ABORT_S = 2.0

pytestmark = pytest.mark.allow_blocking(reason="the hint under test does")


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    RELEASE.clear()
    yield
    RELEASE.set()


@pytest.fixture(autouse=True)
def quick_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "ANSWER_S", 1.0)


class Lines(logging.Handler):
    """Every line, with the thread that logged it, and a way to wait for lines."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self._changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self.found.append((record.threadName or "", record.getMessage()))
            self._changed.notify_all()

    def wait_for(self, count: int, *parts: str) -> list[tuple[str, str]]:
        """The first ``count`` lines whose head contains ``parts``; below it stacks show this very call."""

        def chosen() -> list[tuple[str, str]]:
            return [line for line in self.found if all(part in line[1].partition("\n")[0] for part in parts)]

        with self._changed:
            assert self._changed.wait_for(lambda: len(chosen()) >= count, 20), self.found
            return chosen()[:count]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    logging.getLogger("rrfp").addHandler(handler)
    yield handler
    logging.getLogger("rrfp").removeHandler(handler)


@pytest.mark.parametrize(("count", "stuck"), [(2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3), (7, 1)])
def test_a_rank_whose_loop_is_stuck_is_named_on_all_others(
    lines: Lines, monkeypatch: pytest.MonkeyPatch, count: int, stuck: int
) -> None:
    """The root of the control tree, a node of it and a leaf; each of the others says so itself."""
    monkeypatch.setattr(timeouts, "ANSWER_S", 3.0)  # seven loops on a busy machine may be late by a second
    ranks = ThreadedRanks(stages(count), step, hint=Blocks(stuck), limit="1f1b", stall_after=STALL_S)
    named = lines.wait_for(count - 1, f"stage {stuck} (host ", "has not answered for")
    assert {thread for thread, _ in named} == {f"rrfp-{rank}" for rank in range(count) if rank != stuck}
    RELEASE.set()
    assert [outcome.error for outcome in ranks.join()] == [None] * count
    named_in_vain = [text for _, text in lines.found if "has not answered" in text and f"stage {stuck} (" not in text]
    assert named_in_vain == []


def test_several_ranks_whose_loops_are_stuck_are_all_named(lines: Lines) -> None:
    ranks = ThreadedRanks(stages(4), step, hint=BlocksAtOnce(1, 2), stall_after=STALL_S)
    naming: set[str] = set()
    for count in range(2, 8):  # stage 2 may be stuck only after it has named stage 1
        naming |= {thread for thread, _ in lines.wait_for(count, "stage 1 (host ", "has not answered for")}
        if naming >= {"rrfp-0", "rrfp-3"}:
            break
    assert naming >= {"rrfp-0", "rrfp-3"}
    lines.wait_for(1, "stage 2 (host ", "has not answered for")  # nobody but these two leads from stage 0 to stage 3
    RELEASE.set()
    assert [outcome.error for outcome in ranks.join()] == [None] * 4


def test_it_is_named_again_while_it_lasts_and_its_return_is_told(lines: Lines) -> None:
    ranks = ThreadedRanks(stages(2), step, hint=Blocks(1), stall_after=STALL_S)
    lines.wait_for(3, "stage 1 (host ", "has not answered for")
    RELEASE.set()
    lines.wait_for(1, "stage 1 answers again, after ")
    assert [outcome.error for outcome in ranks.join()] == [None] * 2


def test_polls_go_on_once_it_has_returned(lines: Lines) -> None:
    """A later stall is explained, as if there had been none before."""
    held = threading.Event()

    def body(stage: int, pipe: Any) -> Any:
        step(stage, pipe)
        if stage == 1:
            held.wait(20)
        return step(stage, pipe)

    ranks = ThreadedRanks(stages(3), body, hint=Blocks(2), stall_after=STALL_S)
    lines.wait_for(2, "stage 2 (host ", "has not answered for")
    RELEASE.set()
    lines.wait_for(1, "stage 1 is not in step 1: its program has not called step() yet")
    held.set()
    assert [outcome.error for outcome in ranks.join()] == [None] * 3


def test_once_it_was_given_up_every_later_call_fails_at_once() -> None:
    def body(stage: int, pipe: Any) -> Any:
        with pytest.raises(PipelineAborted):
            step(stage, pipe)
        return step(stage, pipe)

    for outcome in ThreadedRanks(stages(2), body, hint=Blocks(0), stall_after=STALL_S, abort_after=ABORT_S).join():
        assert outcome.abort.origin.stage == 0
        said = re.search(r"its event loop has not run for (\d+\.\d) s", str(outcome.abort))
        assert said is not None
        assert ABORT_S <= float(said[1]) < 20


def test_a_loop_that_runs_again_after_it_was_given_up_ends_the_pipeline_everywhere() -> None:
    """Otherwise the other rank would end its step well, and this one's caller not."""
    has_ended = threading.Event()

    def body(stage: int, pipe: Any) -> Any:
        if stage == 1:
            try:
                return step(stage, pipe)
            finally:
                has_ended.set()
        with pytest.raises(PipelineAborted) as caught:
            step(stage, pipe)
        RELEASE.set()
        assert has_ended.wait(10)
        raise caught.value

    own = {0: {"abort_after": ABORT_S}}
    for outcome in ThreadedRanks(stages(2), body, own, hint=Blocks(0), stall_after=STALL_S).join():
        assert outcome.abort.origin.stage == 0
        assert outcome.abort.origin.cause.startswith("OverdueError: its event loop has not run for")


@pytest.mark.parametrize("loop", ["own", "caller"])
def test_the_stuck_process_logs_the_stacks_of_its_threads(lines: Lines, loop: Any) -> None:
    async def program() -> None:
        async with rrfp.local(stages(2), loss_fn=loss_fn, hint=Blocks(0), stall_after=0.1, loop=loop) as pipe:
            await pipe.step(BATCH.inputs, BATCH.targets)

    def release() -> None:
        lines.wait_for(1, "has not run for")
        RELEASE.set()

    releasing = threading.Thread(target=release)
    releasing.start()
    asyncio.run(program())
    releasing.join()
    [(thread, text)] = lines.wait_for(1, "stage 0, stage 1 (pid ", "its event loop has not run for")
    assert thread == "rrfp-loop-watch"
    first = text.split("\nthread ")[1]
    assert first.startswith("rrfp-local:" if loop == "own" else "MainThread:")
    assert "in block_here" in first


def test_a_callers_own_loop_may_be_busy_between_steps(lines: Lines) -> None:
    async def program() -> None:
        async with rrfp.local(stages(2), loss_fn=loss_fn, stall_after=0.1, loop="caller") as pipe:
            await pipe.step(BATCH.inputs, BATCH.targets)
            time.sleep(1.5)  # noqa: ASYNC251 - a checkpoint, say
            await pipe.step(BATCH.inputs, BATCH.targets)

    asyncio.run(program())
    # On a busy machine a stage may well be idle for as long as `stall_after` within a step.
    assert [text for _, text in lines.found if "has not run for" in text or "has not answered for" in text] == []


def test_a_loop_that_runs_is_left_alone(lines: Lines) -> None:
    async def program() -> None:
        watch = LoopWatchdog("stage 0", 0.5, watch_lock=False)
        watch.start()
        await asyncio.sleep(1.2)
        await watch.close()

    asyncio.run(program())
    assert lines.found == []


def test_a_second_process_that_cannot_start_leaves_the_loop_watched(lines: Lines) -> None:
    async def program() -> None:
        watch = LoopWatchdog("stage\0 0", 1.0, watch_lock=True)  # no argument of a process may hold a NUL
        watch.start()
        await asyncio.sleep(0)
        time.sleep(2.0)  # noqa: ASYNC251 - so the loop does not run
        await watch.close()

    asyncio.run(program())
    assert lines.wait_for(1, "its event loop has not run for")


def children() -> set[str]:
    """The processes that this one has started."""
    found = ""
    for each in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has just ended
            found += each.read_text()
    return set(found.split())


def test_the_second_process_has_ended_when_its_pipeline_was_left() -> None:
    """Also if it was about to begin then."""
    before = children()
    for _ in range(8):
        with rrfp.Pipeline(stages(1)[0], topology=rrfp.Topology(0, 1), transport="inproc"):
            pass
        assert children() <= before
