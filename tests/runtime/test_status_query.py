"""The question for the status of all ranks: each answers along the control tree, and no rank waits for another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from itertools import permutations
from typing import Any, Self

from runtime.ranks import virtual_ranks
from runtime.toys import data, loss_fn, stages

import rrfp
from rrfp import timeouts
from rrfp.model.mesh import Mesh
from rrfp.runtime.control_tree import neighbours, towards
from rrfp.runtime.stall.status import JobStatus
from rrfp.testing.clock import SimulatedTransport, run_virtual
from rrfp.transports.base import Message, MessageKind


def test_the_way_through_the_tree_leads_from_every_rank_to_every_other() -> None:
    for world in range(1, 18):
        for rank, other in permutations(range(world), 2):
            way = [rank]
            while way[-1] != other:
                step = towards(way[-1], other)
                assert step in neighbours(way[-1], world)
                assert step not in way
                way.append(step)


async def test_every_rank_sees_all_others() -> None:
    batch = data(1)
    async with rrfp.local(stages(6), loss_fn=loss_fn, loop="caller") as pipe:
        for number in range(2):
            await pipe.step(batch.inputs, batch.targets)
            for asker, runner in enumerate(pipe._session._runners):
                job = await runner.health.query.ask()
                assert job.asker == asker
                for rank, answer in enumerate(job.answers):
                    assert (answer.rank, answer.stage, answer.name, answer.absent) == (rank, rank, f"stage {rank}", "")
                    assert answer.status is not None
                    assert (answer.status.stage, answer.status.steps_ended) == (rank, number + 1)
                    assert answer.status.training_step == number


class Neighbourhood:
    """Seven ranks: above rank 1 is rank 0, below it are 3 and 4. ``silent`` ones keep what they would answer."""

    def __init__(self, *silent: int) -> None:
        self.asked: list[tuple[int, int]] = []
        self.kept: list[tuple[int, Callable[[], Coroutine[Any, Any, None]]]] = []
        job = self

        class Keeps(SimulatedTransport):
            async def send(self, peer: int, message: Message) -> None:
                rank = self.context.rank
                if message.kind is MessageKind.STATUS_QUERY:
                    job.asked.append((rank, peer))
                if message.kind is MessageKind.STATUS and rank in silent:
                    job.kept.append((rank, partial(super().send, peer, message)))
                else:
                    await super().send(peer, message)

        mesh = Mesh((("pp", 7),))
        self.pipelines = virtual_ranks(mesh, lambda _: 1.0, Keeps, stall_after=1000.0, lock_watch=False)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as entered:
            await asyncio.gather(*(entered.enter_async_context(each) for each in self.pipelines))
            self._entered = entered.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._entered.aclose()

    async def ask(self, rank: int = 1) -> JobStatus:
        return await self.pipelines[rank]._session._runners[0].health.query.ask()

    def asked_by(self, rank: int) -> list[int]:
        """Whom it has asked, since the last look at any."""
        peers = [peer for asker, peer in self.asked if asker == rank]
        self.asked.clear()
        return peers


def test_silence_takes_a_second_and_the_rank_on_the_way_is_named() -> None:
    async def main() -> tuple[JobStatus, float]:
        async with Neighbourhood(0, 3, 4) as ranks:
            began = asyncio.get_running_loop().time()
            return await ranks.ask(), asyncio.get_running_loop().time() - began

    job, seconds = run_virtual(main())
    assert seconds == timeouts.ANSWER_S
    assert [answer.absent for answer in job.answers] == [
        "does not answer",
        "",
        "cannot be reached: stage 0 does not answer",
        "does not answer",
        "does not answer",
        "cannot be reached: stage 0 does not answer",
        "cannot be reached: stage 0 does not answer",
    ]


def test_questions_to_a_silent_rank_do_not_pile_up() -> None:
    async def main() -> None:
        async with Neighbourhood(0, 3, 4) as ranks:
            for _ in range(20):
                await ranks.ask()
            assert ranks.asked_by(1) == [0, 3, 4] * 8
            await ranks.ask(0)
            assert ranks.asked_by(1) == [], "nor do those of another rank"
            await next(send for rank, send in ranks.kept if rank == 3)()  # late, and yet a sign that it takes more
            await asyncio.sleep(1.0)  # in virtual time: it arrives
            await ranks.ask()
            assert ranks.asked_by(1) == [3]

    run_virtual(main())


def test_a_question_is_passed_on_to_all_but_the_one_it_comes_from() -> None:
    async def main() -> None:
        async with Neighbourhood() as ranks:
            job = await ranks.ask(4)
            assert [answer.absent for answer in job.answers] == [""] * 7
            assert ranks.asked_by(1) == [0, 3]

    run_virtual(main())
