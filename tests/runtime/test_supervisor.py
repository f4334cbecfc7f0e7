"""The coroutines of a rank: which ones run. What becomes of them and of their errors whole pipelines show."""

from __future__ import annotations

import asyncio

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
