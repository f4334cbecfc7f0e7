"""`share_replicas=True`: each rank claims the forwards that it runs, and no caller sees another result."""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from runtime.dealt_programs import GIVEN, MESH, STEPS, Counts, batch_of, losses_of, mean, programs, steps
from runtime.group_programs import aborted
from runtime.ranks import ThreadedRanks, virtual_ranks
from runtime.toys import loss_fn

import rrfp
from rrfp.compute.rng import replica_seed
from rrfp.core import events as ev
from rrfp.core.ready_set import ReadySet
from rrfp.errors import ConfigError
from rrfp.hints.priorities import BackwardForward
from rrfp.hints.registry import ScheduleHint
from rrfp.model.mesh import MeshPosition
from rrfp.model.schedule import Schedule
from rrfp.model.tasks import F, Mode, StepId, Task
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.testing.clock import run_virtual
from rrfp.transports.base import Channel, Message, MessageKind
from rrfp.transports.inproc import InprocTransport

TOTAL = sum(GIVEN)


def run(ranks: Sequence[Counts], body: Callable[[int, BlockingPipeline], Any], **options: Any) -> ThreadedRanks:
    return ThreadedRanks(ranks, body, mesh=MESH, share_replicas=True, **options)


@pytest.mark.parametrize("limit", [1, 3])
def test_the_caller_gets_the_results_of_its_own_microbatches(limit: int) -> None:
    ranks = programs()
    results = [outcome.value for outcome in run(ranks, steps, limit=limit).join()]
    for rank, own in enumerate(results):
        replica = MESH.place_of(rank).replica
        assert [result.microbatches for result in own] == [GIVEN[replica]] * STEPS
        for number, result in enumerate(own):
            assert result.losses == pytest.approx(losses_of(replica, number))
            assert result.loss == pytest.approx(mean(number))
            assert max(result.peak_held) <= limit
            slow, quick = result.dealt
            assert slow + quick == TOTAL
            assert slow < GIVEN[0]
    for stage in range(2):
        ran = [m for program in ranks if program.place.stage == stage for m in program.ran]
        assert sorted(ran) == list(range(TOTAL))


class Holds(Counts):
    """A microbatch holds 100 bytes from its forward to its backward."""

    def held_bytes(self, microbatch: int, virtual_stage: int) -> int:
        return 100 if microbatch in self.sizes else 0

    def backward(self, task: rrfp.Task, grads: tuple[rrfp.Payload, ...]) -> tuple[rrfp.Payload, ...]:
        gradients = super().backward(task, grads)
        del self.sizes[task.microbatch]
        return gradients


def test_a_limit_on_bytes_holds_on_every_rank() -> None:
    """There is room for two microbatches, each with 4 bytes of output until that is sent, and not for a third."""
    ranks = [Holds(rank, 0.006 if rank == 2 else 0.001) for rank in range(4)]
    for outcome in run(ranks, steps, limit=rrfp.Limit(bytes=260)).join():
        for result in outcome.value:
            assert 200 <= max(result.peak_bytes) <= 260
            slow, quick = result.dealt
            assert slow + quick == TOTAL
            assert slow < GIVEN[0]


def test_a_limit_on_bytes_that_no_microbatch_fits_lets_one_run_at_a_time() -> None:
    ranks = [Holds(rank) for rank in range(4)]
    for outcome in run(ranks, steps, limit=rrfp.Limit(bytes=1)).join():
        assert all(max(result.peak_held) == 1 for result in outcome.value)


class Chunks(Counts):
    """Two virtual stages a rank, looped or as a V; the first adds what the caller passed, the last has the loss."""

    def forward(self, task: rrfp.Task, inputs: tuple[rrfp.Payload, ...]) -> rrfp.Payload:
        _, m, v = task
        self.ran.append(m)
        received: Any = self._batch.inputs[m] if v == 0 else inputs[0].unpack()
        self.sizes[m] = received.numel()
        time.sleep(self.seconds)
        if v == 0:
            received = received + self._batch.kwargs[m]["more"]
        if v < 3:
            return rrfp.Payload.pack(received)
        self._losses[m] = float((received + self._batch.targets[m]).mean())
        return rrfp.Payload()

    def backward(self, task: rrfp.Task, grads: tuple[rrfp.Payload, ...]) -> tuple[rrfp.Payload, ...]:
        time.sleep(self.seconds)
        return () if task.virtual_stage == 0 else (rrfp.Payload((torch.ones(1),)),)


def given_to(rank: int, number: int, layout: str) -> dict[str, Any]:
    """As `batch_of`, where the last virtual stage of a V is on the first stage."""
    stage, replica, _ = MESH.place_of(rank)
    if layout == "looped":
        return batch_of(rank, number)
    first, last = (batch_of(MESH.rank(MeshPosition(each, replica, 0)), number) for each in range(2))
    return first | last if stage == 0 else {"microbatches": GIVEN[replica]}


@pytest.mark.parametrize("layout", ["looped", "v"])
@pytest.mark.parametrize("limit", [1, 3])
def test_chunks_of_a_stage_are_shared_each_for_itself(layout: str, limit: int) -> None:
    def body(rank: int, pipe: BlockingPipeline) -> list[rrfp.StepResult]:
        return [pipe.step(**given_to(rank, number, layout)) for number in range(STEPS)]

    ranks = [Chunks(rank, 0.006 if rank == 2 else 0.001) for rank in range(4)]
    results = [outcome.value for outcome in run(ranks, body, limit=limit, chunks=2, placement=layout).join()]
    for rank, own in enumerate(results):
        for number, result in enumerate(own):
            assert result.losses == pytest.approx(losses_of(MESH.place_of(rank).replica, number))
            assert result.loss == pytest.approx(mean(number))
            assert max(result.peak_held) <= 2 * limit
            assert sum(result.dealt) == TOTAL
    for stage in range(2):
        ran = [m for program in ranks if program.place.stage == stage for m in program.ran]
        assert sorted(ran) == sorted(2 * [*range(TOTAL)])
    assert len(ranks[2].ran) < len(ranks[3].ran)


def test_each_stage_shares_for_itself() -> None:
    """The ranks of two stages are slow, in two replicas: one whole replica could not take over from another."""
    slow = {0: 0.02, 3: 0.02}
    ranks = [Counts(rank, slow.get(rank, 0.001)) for rank in range(4)]
    run(ranks, steps, limit=3).join()
    ran = [len(program.ran) for program in ranks]
    assert ran[0] + ran[1] == ran[2] + ran[3] == TOTAL
    assert ran[0] < ran[1]
    assert ran[3] < ran[2]


def test_evaluations_run_where_they_are() -> None:
    def body(rank: int, pipe: BlockingPipeline) -> list[Any]:
        first = pipe.step(**batch_of(rank, 0))
        evaluated = pipe.evaluate(**{**batch_of(rank, 1), "weights": None})
        return [first, evaluated, pipe.step(**batch_of(rank, 2))]

    for rank, outcome in enumerate(run(programs(), body).join()):
        first, evaluated, last = outcome.value
        assert evaluated.dealt == ()
        assert evaluated.losses == pytest.approx(losses_of(MESH.place_of(rank).replica, 1))
        assert sum(first.dealt) == sum(last.dealt) == TOTAL


def test_the_random_numbers_of_a_microbatch_are_those_of_its_home() -> None:
    ranks = programs()
    run(ranks, steps).join()
    homes = {(replica_seed(0, replica), m) for replica, count in enumerate(GIVEN) for m in range(count)}
    for program in ranks:
        for batch in program.reopened:
            assert {*batch.homes.values()} == homes
            assert batch.homes == ranks[0].reopened[0].homes


class Zeroes(Counts):
    """Writes into what other callers have passed, once it is used."""

    def __init__(self, rank: int, seconds: float) -> None:
        super().__init__(rank, seconds)
        self.taken: list[weakref.ref[torch.Tensor]] = []

    def forward(self, task: rrfp.Task, inputs: tuple[rrfp.Payload, ...]) -> rrfp.Payload:
        m = task.microbatch
        passed = (self._batch.targets if self.place.stage else self._batch.inputs)[m]
        output = super().forward(task, inputs)
        if self._batch.homes[m][0] != replica_seed(0, self.place.replica):
            passed.zero_()
            self.taken.append(weakref.ref(passed))
        return output


def test_what_a_caller_passed_is_copied_for_others_who_forget_it_at_the_end() -> None:
    ranks = [Zeroes(rank, program.seconds) for rank, program in enumerate(programs())]

    def body(rank: int, pipe: BlockingPipeline) -> int:
        for number in range(STEPS):
            own, passed = batch_of(rank, number), "targets" if ranks[rank].place.stage else "inputs"
            pipe.step(**own)
            assert own[passed] == batch_of(rank, number)[passed]
            assert [taken() for taken in ranks[rank].taken] == [None] * len(ranks[rank].taken)
        return len(ranks[rank].taken)

    assert sum(outcome.value for outcome in run(ranks, body).join()) > STEPS


def test_each_caller_scales_the_gradients_of_its_own_microbatches() -> None:
    def body(rank: int, pipe: BlockingPipeline) -> None:
        pipe.step(**batch_of(rank, 0), grad_scale=1.0 + MESH.place_of(rank).replica)

    ranks = programs()
    run(ranks, body).join()
    total = sum(sum(1.0 + m for m in range(count)) for count in GIVEN)
    for batch in (batch for rank in (2, 3) for batch in ranks[rank].reopened):
        for m, factor in enumerate(batch.gradient_weights):
            seed, home = batch.homes[m]
            assert factor == (1.0 + home) / total * (1.0 if seed == replica_seed(0, 0) else 2.0)


def test_a_loss_that_is_no_number_is_named_by_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int, pipe: BlockingPipeline) -> None:
        own = batch_of(rank, 0)
        if rank == 3:
            own["targets"][2].fill_(math.nan)
        pipe.step(**own)

    run(programs(), body).join()
    assert "the loss of microbatch 2 of replica 1 is nan in training step 0" in caplog.text


def test_a_rank_that_runs_nothing_ends_the_step_too() -> None:
    def body(rank: int, pipe: BlockingPipeline) -> list[Any]:
        own = batch_of(rank, 0)
        return [pipe.step(**{name: values[:1] for name, values in own.items()}) for _ in range(3)]

    ranks = [Counts(rank, 0.05 if rank == 2 else 0.001) for rank in range(4)]
    for outcome in run(ranks, body, limit=1).join():
        assert all(sum(result.dealt) == 2 for result in outcome.value)


def test_without_inputs_the_first_stage_shares_too() -> None:
    class Plain(Counts):
        def forward(self, task: rrfp.Task, inputs: tuple[rrfp.Payload, ...]) -> rrfp.Payload:
            self.ran.append(task.microbatch)
            time.sleep(self.seconds)
            self._losses[task.microbatch] = 0.0
            self.sizes[task.microbatch] = 1
            return rrfp.Payload.pack(torch.ones(1)) if self.place.stage == 0 else rrfp.Payload()

    ranks = [Plain(rank, 0.05 if rank == 0 else 0.001) for rank in range(4)]
    run(ranks, lambda rank, pipe: pipe.step(microbatches=6)).join()
    assert len(ranks[0].ran) + len(ranks[1].ran) == 12
    assert len(ranks[0].ran) < 6


def test_what_one_caller_alone_passes_goes_with_its_microbatches() -> None:
    class Reads(Counts):
        seen: dict[int, Any]

        def _begin(self, batch: rrfp.Batch) -> None:
            super()._begin(batch)
            self.seen = {}

        def forward(self, task: rrfp.Task, inputs: tuple[rrfp.Payload, ...]) -> rrfp.Payload:
            m = task.microbatch
            self.sizes[m] = 1
            time.sleep(self.seconds)
            if self.place.stage == 0:
                self.seen[m] = dict(self._batch.kwargs[m])
                return rrfp.Payload.pack(torch.ones(1))
            self._losses[m] = 0.0
            return rrfp.Payload()

    def body(rank: int, pipe: BlockingPipeline) -> rrfp.StepResult:
        place = MESH.place_of(rank)
        passes = place.stage == 0 and place.replica == 1
        return pipe.step(microbatches=6, kwargs=[{"more": m} for m in range(6)] if passes else None)

    ranks = [Reads(rank, 0.05 if rank == 1 else 0.001) for rank in range(4)]
    run(ranks, body).join()
    assert {**ranks[0].seen, **ranks[1].seen} == {m: {} if m < 6 else {"more": m - 6} for m in range(12)}
    assert len(ranks[0].seen) > 6


def test_a_program_that_has_no_way_to_begin_a_step_anew_is_opened_again() -> None:
    class Opens(Counts):
        reopen = rrfp.StageProgram.reopen

    ranks = [Opens(rank) for rank in range(4)]
    for rank, outcome in enumerate(run(ranks, lambda rank, pipe: pipe.step(**batch_of(rank, 0))).join()):
        assert outcome.value.losses == pytest.approx(losses_of(MESH.place_of(rank).replica, 0))


def test_ranks_of_a_replica_must_have_as_many_microbatches() -> None:
    def body(rank: int, pipe: BlockingPipeline) -> Any:
        own = batch_of(rank, 0)
        return pipe.step(**{name: values[: 5 if rank == 2 else None] for name, values in own.items()})

    for abort in aborted(run(programs(), body).join()):
        assert "the number of microbatches is 5 on stage 1, dp 0 (rank 2), must be 8" in str(abort)


def test_weights_must_be_passed_to_the_ranks_with_losses() -> None:
    def body(rank: int, pipe: BlockingPipeline) -> Any:
        own = batch_of(rank, 0)
        weights = own.pop("weights", [1.0] * len(own.get("inputs", ())))
        return pipe.step(**own, weights=weights if rank in (1, 2) else None)

    for abort in aborted(run(programs(), body).join()):
        assert "weights is passed on stage 0, dp 1 (rank 1) and not on stage 1, dp 1 (rank 3)" in str(abort)


def test_replicas_that_begin_other_steps_are_named() -> None:
    def body(rank: int, pipe: BlockingPipeline) -> Any:
        call = pipe.step if MESH.place_of(rank).replica else pipe.evaluate
        return call(**{**batch_of(rank, 0), "weights": None})

    for abort in aborted(run(programs(), body).join()):
        assert "replicas disagree on the step: " in str(abort)
        assert "step 0 (train" in str(abort)
        assert "step 0 (forward" in str(abort)


class Sent(InprocTransport):
    """Keeps the messages of all ranks about one step, and what replicas tell each other before it."""

    kept: list[tuple[int, int, Message]] = []  # noqa: RUF012 - of all ranks

    async def send(self, peer: int, message: Message) -> None:
        self.kept.append((self.context.rank, peer, message))
        await super().send(peer, message)


def test_before_a_step_each_rank_hears_from_its_own_stage_alone() -> None:
    Sent.kept.clear()
    run(programs(), steps, transport=Sent).join()
    told = [(rank, peer) for rank, peer, message in Sent.kept if message.kind is MessageKind.SHARE]
    assert sorted(told) == sorted(STEPS * [(0, 1), (1, 0), (2, 3), (3, 2)])
    topics = {message.body["topic"] for _, _, message in Sent.kept if message.kind is MessageKind.REPORT}
    assert "microbatches" not in topics


class TellsTwice(InprocTransport):
    """Sends what a caller has twice."""

    async def send(self, peer: int, message: Message) -> None:
        await super().send(peer, message)
        if message.kind is MessageKind.SHARE:
            await super().send(peer, message)


def test_what_a_caller_has_that_comes_twice_ends_the_pipeline() -> None:
    for abort in aborted(run(programs(), steps, transport=TellsTwice).join()):
        assert "sent 'share' of " in str(abort)


def test_a_rank_that_fails_amid_claims_is_named_on_all() -> None:
    class Fails(Counts):
        def forward(self, task: rrfp.Task, inputs: tuple[rrfp.Payload, ...]) -> rrfp.Payload:
            if len(self.ran) == 3:
                raise ValueError("enough")
            return super().forward(task, inputs)

    for abort in aborted(run([*programs()[:3], Fails(3)], steps).join()):
        assert "enough" in str(abort)
        assert abort.origin.rank == 3
        assert abort.origin.task is not None
        forward, home = abort.origin.task.split(" ", 1)
        replica, own = divmod(rrfp.Task.parse(forward).microbatch, GIVEN[0])
        assert home == f"(microbatch {own} of replica {replica})"


class Twice(InprocTransport):
    """Sends every claim twice."""

    async def send(self, peer: int, message: Message) -> None:
        await super().send(peer, message)
        if message.kind is MessageKind.CLAIMED:
            await super().send(peer, message)


def test_a_claim_that_comes_twice_ends_the_pipeline() -> None:
    for abort in aborted(run(programs(), steps, transport=Twice).join()):
        assert "twice" in str(abort)


@pytest.mark.parametrize(
    ("kind", "virtual_stage", "step", "reason"),
    [
        (MessageKind.OFFERED, 9, 0, "rank 3 sent 'offered' of F0@9, which no stage runs"),
        (MessageKind.OFFERED, -1, 0, "rank 3 sent 'offered' of F0@-1, which no stage runs"),
        (MessageKind.MICROBATCH, 1, 7, f"rank 3 sent a microbatch of step 7 (train, {TOTAL} microbatches) in step 0 ("),
    ],
)
def test_a_message_about_another_stage_or_step_ends_the_pipeline(
    kind: MessageKind, virtual_stage: int, step: int, reason: str
) -> None:
    """Rank 3 sends it to its counterpart behind its first claim."""
    odd = [Message(Channel.CONTROL, kind, StepId(step, Mode.TRAIN, TOTAL), Task(F, 0, virtual_stage), body={"copy": 1})]

    class SendsOdd(InprocTransport):
        async def send(self, peer: int, message: Message) -> None:
            await super().send(peer, message)
            if self.context.rank == 3 and message.kind is MessageKind.CLAIMED and odd:
                await super().send(2, odd.pop())

    for abort in aborted(run(programs(), steps, transport=SendsOdd).join()):
        assert reason in str(abort)


def test_without_sizes_the_pace_of_a_rank_is_seconds_for_a_microbatch() -> None:
    paces = set[tuple[float, ...]]()

    class Observes(BackwardForward):
        def observe(self, event: ev.Event) -> None:
            if isinstance(event, ev.StepOpened) and event.pool is not None:
                paces.add(event.pool.paces)

    async def train(pipeline: rrfp.Pipeline) -> None:
        async with pipeline as pipe:
            for _ in range(STEPS):
                await pipe.step(microbatches=4)

    async def main() -> None:
        ranks = virtual_ranks(MESH, lambda task: 1.0, share_replicas=True, hint=Observes)
        await asyncio.gather(*map(train, ranks))

    run_virtual(main())
    assert paces == {(), (2.0, 2.0)}, "not known in the first steps; then a forward and a backward"


class Waits(rrfp.Hint):
    may_wait = True

    def choose(self, ready: ReadySet, view: rrfp.View) -> rrfp.Task | None:
        return None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"order": "natural"}, "order is 'natural', must be 'free' with share_replicas=True"),
        ({"strict": "1f1b"}, "strict is '1f1b', must be None with share_replicas=True"),
        ({"limit": "auto", "chunks": 2}, "limit is 'auto' with 2 chunks a stage, must be 'n', '2n'"),
        (
            {"limit": rrfp.Limit(4, rule="paper"), "chunks": 2},
            "limit has rule 'paper', must have 'staircase' for several chunks a stage with share_replicas=True",
        ),
        ({"hint": ScheduleHint(lambda view: Schedule("mine", ()))}, "ScheduleHint, the schedule of a certain step"),
        ({"hint": Waits}, r"Waits, which may wait for a task \(may_wait\): must never do so with share_replicas=True"),
        ({"deterministic": True}, "deterministic is True, must be False with share_replicas"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(options: dict[str, Any], reason: str) -> None:
    modules: Any = [[torch.nn.Linear(2, 2) for _ in range(options.get("chunks", 1))] for _ in range(2)]
    with pytest.raises(ConfigError, match=reason):
        rrfp.local(modules, loss_fn=loss_fn, share_replicas=True, **options)
