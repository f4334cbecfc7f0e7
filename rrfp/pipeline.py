"""`Pipeline`: what a trainer holds.

The runtime owns its loop: a thread with one loop serves the ranks of this process, so an optimizer step, data loading
or a checkpoint in the caller's code never stalls receiving, heartbeats or an abort. The async API awaits that loop from
the caller's, the blocking API waits for the same future.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypeVar, Unpack, get_args

from rrfp.batching import EvaluateArguments, Plan, StepArguments
from rrfp.blocking import BlockingPipeline
from rrfp.core.tasks import Mode
from rrfp.core.topology import Topology
from rrfp.errors import ConfigError, RrfpError
from rrfp.options import Options, check_rendezvous, pipeline_options
from rrfp.ranks import Ranks
from rrfp.result import StepResult
from rrfp.session import LEAVE_TIMEOUT_S, Session
from rrfp.shape import StagePart
from rrfp.stage import StageRunner
from rrfp.transports.base import Rendezvous
from rrfp.transports.rendezvous import LocalRendezvous, StoreRendezvous

T = TypeVar("T")

#: ``"own"``: a thread with a loop of its own. ``"caller"``: the loop that enters the pipeline (async only).
LoopChoice = Literal["own", "caller"]

#: Pipelines of one process are numbered in the order in which they are made, which every rank of a job shares, as it
#: does for process groups: a rank's third pipeline talks to the others' third.
_numbers = itertools.count()


class PipelineHandle:
    """What `Pipeline` and `rrfp.local` have in common: entering, leaving, and steps.

    Use it as ``async with pipeline as pipe``, or ``with pipeline.blocking() as pipe``. An exception that leaves the
    block aborts the pipeline on every rank, and so does leaving it while a step runs. If another rank failed and no
    step told, leaving raises `PipelineAborted`.

    Args:
        ranks: the ranks of this process.
        loop: where they run.
        name: of the loop's thread.
    """

    def __init__(self, ranks: Ranks, loop: LoopChoice, name: str) -> None:
        if loop not in get_args(LoopChoice):
            raise ConfigError(f"loop is {loop!r}, must be one of: {', '.join(get_args(LoopChoice))}")
        self._session = Session(ranks, name if loop == "own" else None)

    def __enter__(self) -> NoReturn:
        raise TypeError("a pipeline is entered with 'async with', or with 'with pipeline.blocking() as pipe'")

    def __exit__(self, *_: object) -> None:
        """Never reached: see ``__enter__``."""

    async def __aenter__(self) -> Self:
        self._session.enter()
        try:
            await self._on_loop(self._session.ranks.start())
        except BaseException:
            await asyncio.shield(self._leave())
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_TIMEOUT_S):
                    await asyncio.shield(self._on_loop(self._session.close(error)))
        finally:
            await asyncio.shield(self._leave())

    async def step(
        self,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        **arguments: Unpack[StepArguments],
    ) -> StepResult:
        """Train on one batch: gradients are added to ``.grad``; the optimizer's step is the caller's.

        Lists are by microbatch; shapes may differ. A rank that is given none of them passes ``microbatches``.

        Args:
            inputs: for the first virtual stage: a tensor, a tuple (positional arguments) or a dict (keywords) each.
            targets: second argument of ``loss_fn`` on the last virtual stage.
            arguments: ``kwargs``: further keyword arguments of every module on this rank. ``weights``: of the
                microbatches' losses, such as token counts, 1 by default; needed on the last virtual stage.
                ``sizes``: how large each microbatch is, in any unit, for hints that ask. ``microbatches``: M, where no
                list tells it. ``grad_scale``: a factor on every gradient, 1.0 by default; the reported loss is without
                it. ``reduce_gradients``: False leaves gradients unreduced over data-parallel replicas, for all but the
                last of several steps that accumulate.

        Returns:
            The result, on every rank.

        Raises:
            ConfigError: if the arguments do not fit; nothing was sent then.
            PipelineAborted: if any rank failed. Gradients are undefined.
        """
        return await self._run(self._session.plan(Mode.TRAIN, inputs, targets, arguments))

    async def evaluate(
        self,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        **arguments: Unpack[EvaluateArguments],
    ) -> StepResult:
        """Forward only, without gradients. Arguments and errors as in `step`.

        Modules are used in the mode that they are in: call ``module.eval()`` where that matters. Without targets or
        ``loss_fn``, the result's ``outputs`` hold what the last virtual stage put out.
        """
        return await self._run(self._session.plan(Mode.FORWARD, inputs, targets, arguments))

    def blocking(self) -> BlockingPipeline:
        """The same pipeline for ordinary loops: ``with pipeline.blocking() as pipe: pipe.step(...)``.

        Raises:
            ConfigError: if it runs on the caller's loop.
        """
        if self._session.thread_name is None:
            raise ConfigError("loop is 'caller', must be 'own' for the blocking API")
        return BlockingPipeline(self._session)

    async def _run(self, plan: Plan) -> StepResult:
        try:
            return await self._on_loop(self._session.ranks.step(plan))
        except asyncio.CancelledError:
            self._session.fail_soon(RrfpError("the step was cancelled by its caller"))
            raise
        finally:
            self._session.end_step()

    async def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._session.thread is None:
            return await coroutine
        return await asyncio.wrap_future(self._session.submit(coroutine))

    async def _leave(self) -> None:
        if self._session.thread is None:
            self._session.leave()
        else:  # joining a thread blocks, and the caller's loop has other things to do
            await asyncio.to_thread(self._session.leave)


class Pipeline(PipelineHandle):
    """This rank's part of a pipeline over several processes.

    It owns neither model nor optimizer. Every rank makes the same calls in the same order. After `PipelineAborted` it
    is of no further use.

    Args:
        module: this rank's part of the model: a module, a list with one module for each chunk, or a `StageProgram`.
        topology: this rank's place; from torchrun's environment by default.
        rendezvous: where ranks find each other; torchrun's store by default.
        loop: where the runtime lives.
        options: see `PipelineOptions`.

    Raises:
        ConfigError: for an argument that does not exist or does not fit.
    """

    def __init__(
        self,
        module: StagePart,
        *,
        topology: Topology | None = None,
        rendezvous: Rendezvous | None = None,
        loop: LoopChoice = "own",
        **options: Unpack[Options],
    ) -> None:
        settings = pipeline_options(options)
        check_rendezvous(rendezvous)
        place = Topology.from_env() if topology is None else topology
        shape = settings.shape(place.stages, [module])
        modules = shape.modules(module, place.stage)
        shape.check_shared(modules)
        program = settings.program(module, place, shape)
        run_id = f"{place.run_id}/{next(_numbers)}"

        async def build() -> Sequence[StageRunner]:
            met = rendezvous if rendezvous is not None else await _meet(place, run_id, settings.connect_timeout)
            return [settings.runner(place, shape, module, program, run_id, met)]

        super().__init__(Ranks([program], settings, build, list(modules.values())), loop, f"rrfp-{place.rank}")


class LocalPipeline(PipelineHandle):
    """All stages in this process; see `local`."""

    def __init__(self, modules: Sequence[StagePart], *, loop: LoopChoice = "own", **options: Unpack[Options]) -> None:
        settings = pipeline_options({"transport": "inproc", **options})
        if not modules:
            raise ConfigError("modules is empty, must hold one module a stage")
        shape = settings.shape(len(modules), modules)
        by_virtual_stage = shape.all_modules(modules)
        shape.check_shared(by_virtual_stage)
        places = [Topology(stage, len(modules)) for stage in range(len(modules))]
        programs = [settings.program(module, place, shape) for place, module in zip(places, modules, strict=True)]
        run_id = f"local-{uuid.uuid4().hex}"
        met = LocalRendezvous()

        async def build() -> Sequence[StageRunner]:
            return [
                settings.runner(place, shape, module, program, run_id, met)
                for place, module, program in zip(places, modules, programs, strict=True)
            ]

        super().__init__(Ranks(programs, settings, build, list(by_virtual_stage.values())), loop, "rrfp-local")


def local(modules: Sequence[StagePart], *, loop: LoopChoice = "own", **options: Unpack[Options]) -> LocalPipeline:
    """All stages of a pipeline in one process, over the ``inproc`` transport: for tests, debugging and small models.

    The CPU tasks of all stages share torch's one random generator, so they take one lock: nothing runs in parallel, but
    everything else (readiness, arbitration, messages, failures) is as between processes.

    Args:
        modules: one a stage, in order; with chunks, a list of modules for each stage.
        loop: where the runtime lives.
        options: see `PipelineOptions`.
    """
    return LocalPipeline(modules, loop=loop, **options)


async def _meet(place: Topology, run_id: str, timeout_s: float) -> Rendezvous:
    if place.world == 1:
        return LocalRendezvous()
    return await StoreRendezvous.from_env(replace(place, run_id=run_id), timeout_s=timeout_s)
