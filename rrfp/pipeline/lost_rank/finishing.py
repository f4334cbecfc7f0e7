"""Finishing a step without a lost rank, on one rank of those that are left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol, TypeVar

from torch import nn

from rrfp.compute.program import Batch
from rrfp.compute.rng import replica_seed
from rrfp.errors import Origin, PipelineAborted, RankLostError, RrfpError, StageError, TransportError
from rrfp.log import get_logger
from rrfp.model.tasks import Mode, StepId
from rrfp.model.topology import Topology
from rrfp.model.visits import Visits
from rrfp.pipeline.lost_rank.roll_call import Decision, End, RollCall, RollCallAnswer
from rrfp.pipeline.lost_rank.step_snapshot import StepSnapshot
from rrfp.pipeline.lost_rank.survivors import Survivors
from rrfp.pipeline.lost_rank.watch import SurvivorWatch
from rrfp.runtime import records
from rrfp.runtime.abort import Failure, describe, failure_of, lost_rank
from rrfp.runtime.stage_runner import StageRunner
from rrfp.runtime.steps.batch_copies import CopiedBatch
from rrfp.runtime.steps.passed import factors_of
from rrfp.runtime.steps.plan import StepPlan
from rrfp.runtime.steps.result import StepResult
from rrfp.trace.spans import StepTrace
from rrfp.transports.base import Rendezvous
from rrfp.transports.rendezvous import StoreRendezvous, in_thread
from rrfp.transports.secret import Secret

logger = get_logger(__name__)

T = TypeVar("T")

#: Runs a plan on the whole replicas that a decision names.
RunAgain = Callable[[Decision, StepPlan], StepResult]


class Submit(Protocol):
    """Runs a coroutine on the pipeline's loop, and waits for it."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T:
        """Its result."""


@dataclass(frozen=True, slots=True)
class _Losses:
    """What a rank knows of the losses of a step that was run again."""

    loss: float | None = None
    #: The replica that its own took over; -1 for none; and the losses of that one's microbatches.
    taken: int = -1
    losses: tuple[float, ...] = ()


class Finishing:
    """Of one pipeline. ``seed`` is that of random numbers, ``timeout_s`` how long the others may take to come."""

    def __init__(
        self,
        topology: Topology,
        run_id: str,
        secret: Secret | None,
        torch_ranks: Sequence[int],
        seed: int,
        timeout_s: float,
    ) -> None:
        #: The ranks that are left, once all of them know; None before a loss.
        self.survivors: Survivors | None = None
        #: No step follows: the last one was finished without a rank, or could not be.
        self.has_ended = False
        self._topology = topology
        self._run_id = run_id
        self._secret = secret
        self._torch_ranks = torch_ranks
        self._seed = seed
        self._timeout_s = timeout_s
        self._roll_call: RollCall | None = None
        self._deciding: asyncio.Task[Decision] | None = None
        #: On whose host the rendezvous store is, where that is known.
        self._store_rank: int | None = None
        #: Once there is a decision.
        self._watch: SurvivorWatch | None = None
        self._runner: StageRunner | None = None
        #: The newest step of this rank's caller, and its result while the reports of all ranks are not here.
        self._plan: StepPlan | None = None
        self._result: StepResult | None = None
        self._snapshot: StepSnapshot | None = None

    # On the loop.

    def serve(self, runner: StageRunner, rendezvous: Rendezvous) -> None:
        """``runner`` is this rank's; nothing has failed yet."""
        self._runner = runner
        self._roll_call = RollCall(self._topology, self._run_id, self._secret, rendezvous)
        if isinstance(rendezvous, StoreRendezvous) and rendezvous.is_of_first_host:
            self._store_rank = self._torch_ranks.index(0)
        runner.abort.on_failure = self._failed

    def keep(self, result: StepResult) -> None:
        """This rank has done its part of the step."""
        self._result = result

    def _failed(self, failure: Failure) -> None:
        """The pipeline has failed: if a rank was lost, hold the roll call, whatever this rank's caller does."""
        assert self._runner is not None
        assert self._roll_call is not None
        if (lost := lost_rank(failure.origin)) is None or lost == self._topology.rank:
            return
        steps = self._runner.steps_ended
        has_copy = self._runner.has_copied(steps)
        own = RollCallAnswer(self._topology.rank, steps, has_copy, self._cannot(steps), lost)
        self._deciding = asyncio.create_task(self._decide(self._roll_call, own))

    async def _decide(self, roll_call: RollCall, own: RollCallAnswer) -> Decision:
        decision = await roll_call.hold(own)
        self._watch = SurvivorWatch(roll_call, decision.survivors, self._topology, self._store_rank)
        return decision

    async def decision(self) -> Decision | None:
        """Wait for that of all ranks that are left; None where no rank was lost."""
        return None if self._deciding is None else await asyncio.shield(self._deciding)

    async def loss(self) -> PipelineAborted:
        """Wait for the loss of a further rank."""
        return await self._watched.loss()

    async def leave(self) -> bool:
        """The loop will end, and other ranks may need this one in the roll call; whether these can go on."""
        if self._deciding is None:
            return False
        await asyncio.wait({self._deciding})
        if self._watch is not None:
            await self._watch.leave()
        return not self._deciding.cancelled() and self._deciding.exception() is None

    @property
    def _watched(self) -> SurvivorWatch:
        assert self._watch is not None, "there is a decision"
        return self._watch

    # On the caller's thread.

    def open(self, plan: StepPlan, modules: Mapping[int, nn.Module]) -> None:
        """A step begins."""
        self._plan, self._result = plan, None
        self._snapshot = StepSnapshot.take(modules) if plan.step.mode is Mode.TRAIN else None

    def check_open(self) -> None:
        """Raise an RrfpError if no step follows."""
        if self.has_ended:
            assert self.survivors is not None
            lost = " and ".join(map(str, self.survivors.decision.lost))
            raise RrfpError(f"rank {lost} was lost, and no step follows: save a checkpoint with pipe=pipe, and end")

    def decide(self, error: PipelineAborted, submit: Submit) -> Survivors:
        """The ranks that are left after ``error``, which is raised where no rank was lost, or they cannot go on."""
        if self.survivors is None:
            try:
                decision = submit(self.decision())
            except PipelineAborted:
                raise
            except Exception as failed:
                error.add_note(f"the others cannot finish the step: {describe(failed)}")
                raise error.with_traceback(None) from error.__cause__
            if decision is None:
                raise error.with_traceback(None)
            stages = {self._topology.place_of(rank).stage for rank in decision.survivors}
            if gone := [stage for stage in range(self._topology.stages) if stage not in stages]:
                error.add_note(f"the others cannot go on: no rank of stage {gone[0]} is left")
                raise error.with_traceback(None) from error.__cause__
            watch, own = self._watched, self._topology

            def join(make: Callable[[], T]) -> T:
                return submit(watch.unless_lost(self._join(make, decision.survivors)))

            def explain(failed: Exception) -> PipelineAborted:
                cause = f"RankLostError: one of the ranks that were left ended meanwhile: {failed}"
                return PipelineAborted(submit(watch.soon()) or Origin(own.stage, None, cause, own.rank))

            self.survivors = Survivors(decision, own, self._torch_ranks, join, explain)
        return self.survivors

    def refuse(self, error: PipelineAborted, submit: Submit, step: int, reason: str) -> NoReturn:
        """Raise a RankLostError: ``step`` is the first training step that is not done."""
        lost = self.decide(error, submit).decision.lost
        self.has_ended = True
        raise RankLostError(error.origin, lost, step, reason)

    async def _join(self, make: Callable[[], T], ranks: Sequence[int]) -> T:
        """Make a group, once all are here. On another thread, which stays behind if a rank is lost meanwhile."""
        assert self._roll_call is not None
        await self._roll_call.meet("group", ranks, self._timeout_s)
        return await in_thread(make)

    def finish(
        self,
        error: PipelineAborted,
        modules: Mapping[int, nn.Module],
        submit: Submit,
        retire: Callable[[], Coroutine[Any, Any, None]],
        run_again: RunAgain,
    ) -> StepResult:
        """The result of the step that ``error`` has ended; a `RankLostError` if it cannot be run again.

        ``retire`` frees this rank, and ends when nothing of the step runs any more.
        """
        began = time.monotonic()
        survivors = self.decide(error, submit)
        decision, plan = survivors.decision, self._plan
        assert plan is not None
        self.has_ended = True
        number, training_step = plan.step.number, plan.batch.training_step
        if number < decision.step:  # all ranks have done it, and the reports of some are not here
            assert self._result is not None
            seconds = time.monotonic() - began
            return replace(self._result, seconds=seconds, breakdown=(), peaks=(), slots=(), lost=decision.lost)
        if decision.why or plan.step.mode is not Mode.TRAIN:
            self.refuse(error, submit, training_step, decision.why or "An evaluation is not run again")
        result = self._run_again(plan, survivors, submit, retire, run_again)
        survivors.pass_gradients(modules)
        result = self._with_losses(plan, result, survivors, time.monotonic() - began)
        if decision.survivors[0] == self._topology.rank:
            logger.warning(
                "rank %s was lost in training step %d (%s): the others have finished it without, in %.1f s",
                " and ".join(map(str, decision.lost)),
                training_step,
                error.origin.cause,
                time.monotonic() - began,
            )
        return result

    def _run_again(
        self,
        plan: StepPlan,
        survivors: Survivors,
        submit: Submit,
        retire: Callable[[], Coroutine[Any, Any, None]],
        run_again: RunAgain,
    ) -> StepResult | None:
        """What this rank's replica computes; None if it is broken, once the others have."""
        decision, roll_call, watch = survivors.decision, self._roll_call, self._watched
        assert roll_call is not None
        assert self._snapshot is not None
        is_whole = self._topology.replica in decision.whole
        ranks = decision.ranks(self._topology)
        result: StepResult | None = None
        try:
            submit(retire())
            if cannot := self._cannot(plan.step.number):
                raise StageError(f"the step cannot be run again: {cannot}")
            self._snapshot.restore()
            if is_whole:
                joined_plan = self._joined(plan, decision)
                submit(watch.unless_lost(roll_call.meet("again", ranks, self._timeout_s)))
                try:
                    result = run_again(decision, joined_plan)
                except PipelineAborted as aborted:
                    raise self._renumbered(aborted, ranks) from aborted.__cause__
        except BaseException as failed:
            # Torch names a connection, and who waits at the start for another rank itself.
            loss = submit(watch.soon()) if isinstance(failed, TransportError | RuntimeError) else None
            failure = failure_of(failed, self._topology) if loss is None else Failure(loss)
            culprit = failure.origin.rank
            assert culprit is not None
            with suppress(RrfpError, TimeoutError):  # there is an error to report already
                submit(roll_call.publish_end(End(failure.origin.cause, culprit)))
            if isinstance(failed, Exception):
                raise failure.error()  # noqa: B904 - it has a cause, or needs none
            raise
        if is_whole:
            submit(watch.unless_lost(roll_call.publish_end(End())))
        else:
            submit(watch.unless_lost(roll_call.ends(ranks)))
        return result

    def _renumbered(self, aborted: PipelineAborted, ranks: Sequence[int]) -> PipelineAborted:
        """What has ended the smaller pipeline, whose ``ranks`` are numbered anew."""
        origin = aborted.origin
        if origin != self._watched.origin:
            origin = replace(origin, rank=ranks[origin.stage if origin.rank is None else origin.rank])
        return PipelineAborted(origin)

    def _cannot(self, number: int) -> str:
        """Why this rank cannot run step ``number`` again; empty if it can, or has not begun it."""
        plan, snapshot, runner = self._plan, self._snapshot, self._runner
        if plan is None or runner is None or plan.step.number != number:
            return ""
        if snapshot is None:
            return "it is an evaluation"
        if not plan.reduce_gradients:
            return "reduce_gradients is False"
        return snapshot.cannot or runner.batch_written() or ""

    def _joined(self, plan: StepPlan, decision: Decision) -> StepPlan:
        """The plan of this rank's replica with the microbatches of the one that it takes over."""
        assert self._runner is not None
        own, replicas = self._topology.replica, self._topology.replicas
        copied = None
        if decision.takes_over(own, replicas) is not None:
            copied = self._runner.copied(plan.step.number)
            assert copied is not None, "the decision says that it is here"
        is_alone = len(decision.whole) == 1
        return joined(plan, plan.batch_of(self._topology.stage), copied, own, self._seed, is_alone=is_alone)

    def _with_losses(
        self, plan: StepPlan, result: StepResult | None, survivors: Survivors, seconds: float
    ) -> StepResult:
        """The result of this rank's own caller, given what its replica has computed."""
        count, own = plan.step.microbatches, self._topology
        told = _Losses()
        if result is not None:
            taken = survivors.decision.takes_over(own.replica, own.replicas)
            told = _Losses(result.loss, -1 if taken is None else taken, result.losses[count:])
        every = [records.unpack(_Losses, each, "the losses of a step") for each in survivors.gather(records.pack(told))]
        if result is not None:
            return replace(result, microbatches=count, losses=result.losses[:count], lost=survivors.decision.lost)
        loss = next((each.loss for each in every if each.loss is not None), None)
        losses = next((each.losses for each in every if each.taken == own.replica), ())
        trace = StepTrace(plan.step.number, 0.0, seconds)
        lost = survivors.decision.lost
        return StepResult(plan.batch.training_step, Mode.TRAIN, count, loss, losses, seconds, (), (), trace, lost=lost)


def joined(
    plan: StepPlan, batch: Batch, copied: CopiedBatch | None, replica: int, seed: int, *, is_alone: bool
) -> StepPlan:
    """The plan of ``replica`` with the microbatches of another one behind its own, to be run as its first step.

    If it ``is_alone``, no other replica adds to the sum of weights.
    """
    count = plan.step.microbatches
    more = 0 if copied is None else copied.microbatches
    factors = factors_of(batch)

    def both(own: Sequence[Any] | None, name: str, blank: Any = None) -> list[Any] | None:
        others = None if copied is None else getattr(copied, name)
        if own is None and others is None:
            return None
        return [*(own or [blank] * count), *(others or [blank] * more)]

    weights, sizes = both(plan.weights, "weights", 1.0), both(plan.sizes, "sizes")
    scales = [*factors.grad_scales, *([] if copied is None else [copied.grad_scale] * more)]
    shared = factors.dealt(weights, scales)
    if is_alone:
        shared.normalise(float(count + more) if weights is None else float(sum(weights)))
    homes = {m: (replica_seed(seed, replica), m) for m in range(count)}
    if copied is not None:
        homes |= {count + m: (replica_seed(seed, copied.replica), m) for m in range(more)}
    inputs: Any = batch.inputs
    targets: Any = batch.targets
    kwargs: Any = batch.kwargs
    return replace(
        plan,
        step=StepId(0, Mode.TRAIN, count + more),
        batch=Batch(
            both(inputs, "inputs"),
            both(targets, "targets"),
            both(kwargs, "kwargs", {}),
            shared,
            batch.return_outputs,
            batch.training_step,
            homes,
        ),
        weights=None if weights is None else tuple(weights),
        sizes=None if sizes is None or None in sizes else tuple(sizes),
        visits=Visits(count + more),
        loss_scale=None,
        kwargs=None,
        refused=0,
    )
