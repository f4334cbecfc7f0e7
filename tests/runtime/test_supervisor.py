"""The coroutines of a rank: what runs, what is dropped, and where their errors go."""

from __future__ import annotations

import asyncio
import gc
import weakref

from rrfp.model.tasks import Task
from rrfp.runtime.supervisor import TaskSupervisor


def nothing_fails(error: BaseException, task: Task | None) -> None:
    raise AssertionError(f"{error!r} of {task}")


async def test_a_coroutine_runs_only_between_start_and_stop() -> None:
    supervisor = TaskSupervisor(nothing_fails)
    ran: list[str] = []
    may_end = asyncio.Event()

    async def run(name: str, end: asyncio.Event) -> None:
        ran.append(name)
        await end.wait()

    supervisor.spawn(run("before", may_end))
    await supervisor.start()
    supervisor.spawn(run("meanwhile", may_end))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(supervisor.stop())
    await asyncio.sleep(0)
    assert supervisor.stopping
    supervisor.spawn(run("while stopping", may_end))
    assert not stopping.done()  # it waits for what was spawned before
    may_end.set()
    await stopping
    supervisor.spawn(run("after", may_end))
    await asyncio.sleep(0)
    assert ran == ["meanwhile"]


async def test_stop_ends_the_permanent_coroutines_and_cancel_all() -> None:
    supervisor = TaskSupervisor(nothing_fails)
    forever = asyncio.Event()
    ended: list[str] = []

    async def wait(name: str) -> None:
        try:
            await forever.wait()
        finally:
            ended.append(name)

    await supervisor.start(wait("permanent"))
    supervisor.spawn(wait("spawned"))
    await asyncio.sleep(0)
    supervisor.cancel()
    await supervisor.stop()
    assert sorted(ended) == ["permanent", "spawned"]


async def test_an_error_goes_to_its_handler_with_its_task_and_the_others_go_on() -> None:
    errors: list[tuple[str, Task | None]] = []
    supervisor = TaskSupervisor(lambda error, task: errors.append((str(error), task)))
    reached = asyncio.Event()

    async def fail() -> None:
        raise OSError("gone")

    async def reach() -> None:
        await asyncio.sleep(0)
        reached.set()

    await supervisor.start()
    supervisor.spawn(fail(), Task.parse("F0@0"))
    supervisor.spawn(reach())
    await reached.wait()
    await supervisor.stop()
    assert errors == [("gone", Task.parse("F0@0"))]


async def test_a_coroutine_that_has_ended_is_forgotten() -> None:
    supervisor = TaskSupervisor(nothing_fails)
    running: list[weakref.ref[asyncio.Task[None]]] = []

    async def work() -> None:
        current = asyncio.current_task()
        assert current is not None
        running.append(weakref.ref(current))

    await supervisor.start()
    supervisor.spawn(work())
    for _ in range(3):  # it runs, it ends, its end is noticed
        await asyncio.sleep(0)
    gc.collect()
    assert [task() for task in running] == [None]
    await supervisor.stop()
