"""`ScheduleRRFP`: a schedule of ``torch.distributed.pipelining`` whose order of tasks is RRFP's readiness."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rrfp import CallerModes, Mode, Pipeline, PipelineAborted, StepResult
from rrfp.errors import ConfigError, Faults
from rrfp.hints import Placement
from rrfp.integrations.open_pipeline import OpenPipeline
from rrfp.integrations.torch import checks, private
from rrfp.integrations.torch.limits import INIT_S, STAGES, ReceiveWatch, shapes_of, within
from rrfp.integrations.torch.private import Stage, TorchSchedule
from rrfp.integrations.torch.program import StageTasks, StepData, Unsplittable, unwrapped

if TYPE_CHECKING:
    from torch.distributed.pipelining.microbatch import TensorChunkSpec

#: The first numbers that ranks exchange, which must be equal on all.
_COMMON = ("num_stages of the stages", "n_microbatches", "loss_fn", "scale_grads")

#: How to write the numbers that stand for something else.
_WORDS = {"loss_fn": ("None", "a function"), "scale_grads": ("False", "True")}


@dataclass(frozen=True, slots=True)
class Layout:
    """The stages of a pipeline."""

    #: The rank of every stage.
    ranks: tuple[int, ...]
    #: a number that the ranks of this schedule share, and no others.
    token: int

    @classmethod
    def gather(cls, stages: Sequence[Stage], microbatches: int, *, has_loss: bool, scales_grads: bool) -> Layout:
        """Exchange the stages of all ranks of the stages' group; blocks until all ranks call it."""
        first = stages[0]
        numbers = [first.num_stages, microbatches, has_loss, scales_grads, secrets.randbits(62)]
        by_rank = _all_gather(first, numbers)
        for name, values in zip(_COMMON, zip(*by_rank, strict=True), strict=False):
            if len(set(values)) > 1:
                shown = [_WORDS[name][value] for value in values] if name in _WORDS else values
                raise ConfigError(f"{name} is {_by_rank(shown)}, must be the same on all ranks")
        mine = {stage.stage_index for stage in stages}
        masks = _all_gather(first, [int(v in mine) for v in range(first.num_stages)])
        holders = [[rank for rank, mask in enumerate(masks) if mask[v]] for v in range(first.num_stages)]
        for v, ranks in enumerate(holders):
            if len(ranks) != 1:
                held = f"on the ranks {', '.join(map(str, ranks))}" if ranks else "on no rank"
                stages_of = [tuple(v for v, is_held in enumerate(mask) if is_held) for mask in masks]
                raise ConfigError(f"stages are {_by_rank(stages_of)}: stage {v} is {held}, must be on one")
        return cls(tuple(rank for (rank,) in holders), by_rank[0][-1])


def _all_gather(stage: Stage, values: Sequence[int]) -> list[list[int]]:
    """The values of every rank of the stage's group, by rank."""
    own = torch.tensor(values, dtype=torch.int64, device=stage.device)
    gathered = [torch.empty_like(own) for _ in range(stage.group_size)]
    dist.all_gather(gathered, own, group=stage.group)
    return [part.tolist() for part in gathered]


def _by_rank(values: Sequence[object]) -> str:
    shown = (list(value) if isinstance(value, tuple) else value for value in values)
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(shown))


#: The placements of `rrfp.Pipeline` that have a name.
PlacementName = Literal["looped", "v"]


def pipeline_of(
    tasks: StageTasks,
    stages: Sequence[Stage],
    layout: Layout,
    mesh: DeviceMesh | None,
    coordinate: Sequence[str] | None,
    options: dict[str, Any],
) -> Pipeline:
    """The pipeline of the stages' group, not entered."""
    first = stages[0]
    device = torch.device(first.device)
    if device.type != "cpu":
        options = {"device": device, **options}
    options = {**_placement_of(layout, first.group_size), **options}
    if mesh is not None:
        return Pipeline(tasks, mesh=mesh, coordinate=coordinate, **options)
    group: Any = dist.group.WORLD if first.group is None else first.group
    alone = DeviceMesh.from_group(group, device.type, mesh_dim_names=("pp",))
    return Pipeline(tasks, mesh=alone, name=f"torch-{layout.token:x}", **options)


def _placement_of(layout: Layout, ranks: int) -> dict[str, Any]:
    """The options that place the stages: by name where they have one, which generated schedules need."""
    chunks = len(layout.ranks) // ranks
    for name in get_args(PlacementName):
        placement = Placement(ranks, max(1, chunks), name)
        if layout.ranks == tuple(map(placement.stage_of, range(placement.num_virtual_stages))):
            return {"chunks": chunks, "placement": name}
    return {"placement": layout.ranks}


class ScheduleRRFP(TorchSchedule):
    """Runs torch's pipeline stages by readiness: a rank runs any task whose inputs are here, not the next of a list.

    It takes the place of ``Schedule1F1B``, ``ScheduleInterleaved1F1B``, ``ScheduleInterleavedZeroBubble``,
    ``ScheduleZBVZeroBubble`` and the like, over the same `PipelineStage` objects, one or several a rank, looped, in a
    V or otherwise. All ranks of the stages' group must build it, and call `step` and `eval` alike. It ends with the
    process, or when its last reference goes; `close` ends it before.

    If a rank fails or dies, `step` raises `rrfp.PipelineAborted` on all ranks, which names the rank, the task and the
    cause; the schedule cannot be used afterwards.

    Args:
        stages: the stages of this rank: one, or a list.
        n_microbatches: M.
        loss_fn: ``loss_fn(output, target, **loss_kwargs)``; None: there is no backward.
        args_chunk_spec: how to cut positional arguments into microbatches.
        kwargs_chunk_spec: how to cut keyword arguments.
        output_merge_spec: how to merge outputs.
        use_full_backward: torch ignores it, with a warning; see ``split``.
        scale_grads: whether `step` divides all that ``.grad`` holds by M at its end.
        backward_requires_autograd: whether a `step` under ``no_grad`` is refused.
        split: whether a backward is split into the gradients of inputs and those of weights, by RRFP's own rules
            (`rrfp.SplitBackward`); stages with a ``dw_builder`` split by that.
        mesh: where tasks contain collectives, such as those of tensor parallelism: the mesh with the dims of the
            pipeline, ``pp``, and of those collectives.
        coordinate: the dims of ``mesh`` whose ranks run tasks in the same order; by default ``("tp",)``.
        init_timeout: seconds for torch's exchanges between ranks before the first step: of which rank holds which
            stages, and of shapes, for which stages run once and may be compiled.
        options: of `rrfp.Pipeline`, such as ``hint``, ``limit``, ``strict``, ``transport`` or ``deterministic``.

    Attributes:
        last_result: the `rrfp.StepResult` of the last `step` or `eval`, with where its time went; None before.

    Raises:
        ConfigError: for arguments that do not fit, or stages that cannot run so; names all of them and the allowed
            values. It is a ValueError.
        TransportError: if the ranks do not meet in time.
    """

    #: Options of a class that `configured` made.
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        stages: Stage | Sequence[Stage],
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        *,
        mesh: DeviceMesh | None = None,
        coordinate: Sequence[str] | None = None,
        init_timeout: float | None = None,
        **options: Any,
    ) -> None:
        options = {**self.defaults, **options}
        # `configured` may give these defaults, too.
        defaults = {name: options.pop(name, None) for name in ("mesh", "coordinate", "init_timeout")}
        mesh = defaults["mesh"] if mesh is None else mesh
        coordinate = defaults["coordinate"] if coordinate is None else coordinate
        limits = (init_timeout, defaults["init_timeout"], INIT_S)
        self._init_timeout = next(limit for limit in limits if limit is not None)
        with Faults() as faults:
            with faults.kept():
                checks.check_microbatches(n_microbatches)
            with faults.kept():
                checks.check_init_timeout(self._init_timeout)
            with faults.kept():
                checks.check_loss(loss_fn)
            with faults.kept():
                listed = checks.check_stages(stages)
                checks.check_mesh(mesh, coordinate, listed[0])
                checks.check_options(options, listed)
                in_order = checks.ranks_in_order(mesh, coordinate)
                for stage in listed:
                    checks.check_collectives(stage, in_order)
        super().__init__(
            listed,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            use_full_backward,
            scale_grads,
            backward_requires_autograd,
        )
        self.last_result: StepResult | None = None
        self._finalizes = True
        gather = partial(
            Layout.gather, listed, n_microbatches, has_loss=loss_fn is not None, scales_grads=bool(scale_grads)
        )
        arrivals = ReceiveWatch(listed[0], STAGES)
        arrivals.come()
        layout = self._in_time(arrivals, gather)
        self.map_stages(dict(enumerate(layout.ranks)))
        divisor = n_microbatches if scale_grads else 1
        self._tasks = StageTasks(listed, split=_split_of(options), divisor=divisor)
        self._pipe = OpenPipeline(pipeline_of(self._tasks, listed, layout, mesh, coordinate, options), self, "schedule")
        self._shapes = ReceiveWatch(listed[0], shapes_of(layout.token))
        #: Whether the stages know the shapes of training or of evaluations; None before the first call.
        self._shapes_train: bool | None = None

    @classmethod
    def configured(cls, **options: Any) -> type[ScheduleRRFP]:
        """A schedule class with other defaults, for programs that take a class and pass it torch's arguments only.

        Args:
            options: keyword arguments of the class, such as ``hint``, ``limit`` or ``split``.

        Returns:
            The class.
        """
        return type(cls.__name__, (cls,), {"defaults": {**cls.defaults, **options}, "__doc__": cls.__doc__})

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run one training step; without a ``loss_fn``, or in `eval`, its forwards only.

        The batch is whole, to be cut into microbatches, or cut already; then microbatches may differ in shape.

        Args:
            args: positional arguments of the first stage, a whole batch; only there.
            target: the targets, a whole batch; on the rank of the last stage.
            losses: a list that gets the loss of every microbatch, in their order; on the rank of the last stage.
            return_outputs: whether to keep and merge the outputs of the last stage.
            loss_kwargs: further keyword arguments of ``loss_fn``.
            arg_mbs: instead of ``args``: a tuple for each microbatch.
            kwarg_mbs: instead of ``kwargs``: a dict for each microbatch.
            target_mbs: instead of ``target``: the target of each microbatch.
            finalize_gradients: whether FSDP2 reduces gradients and frees parameters at the end. With False they stay
                as they are until the end of a step with True. No effect on stages without FSDP2.
            kwargs: keyword arguments of the stages of this rank, a whole batch.

        Returns:
            On the rank of the last stage the merged outputs, if wanted; else None.

        Raises:
            PipelineAborted: if any rank failed. It is a RuntimeError too, and a ``PipeliningMetadataError`` of torch if
                that is the cause.
            ConfigError: if there are targets or ``losses`` without a ``loss_fn``, the last stage lacks its targets,
                ``loss_kwargs`` is no dict, or another schedule has prepared these stages for another number of
                microbatches since.
            RuntimeError: if a backward needs the grad mode that the caller has switched off.
            TransportError: if the exchange of shapes before the first step took too long.
            TypeError: if the lists by microbatch are none.
            ValueError: if they have not M entries, or a whole batch is passed too.
        """
        if self.trains and self.needs_grad_mode and not torch.is_grad_enabled():
            raise RuntimeError("step() has a backward, and was called without gradients; call eval() instead")
        if self.last_result is not None:
            checks.check_prepared(self._stages, self.n_microbatches)
        checks.check_loss(None, loss_kwargs)
        if not self.has_loss:
            checks.check_no_loss(target=target, target_mbs=target_mbs, losses=losses)
        if arg_mbs is None and kwarg_mbs is None and target_mbs is None:
            arg_mbs, kwarg_mbs, target_mbs = self.split(args, kwargs, target)
        else:
            checks.check_cut(args, kwargs, target, arg_mbs, kwarg_mbs)
        self._finalizes = finalize_gradients
        for stage in self._stages:
            stage.has_backward = self.trains
            stage.clear_runtime_states()
        try:
            self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs)
        except PipelineAborted as error:
            raise private.ScheduleAborted.of(error) from error.__cause__
        last = self._stages[-1]
        return self.merge(last.output_chunks) if last.is_last and return_outputs else None

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the forwards of one batch, without gradients; arguments, result and errors as in `step`.

        Args:
            args: as in `step`.
            target: as in `step`; without targets no loss is computed.
            losses: as in `step`.
            kwargs: as in `step`, its keyword arguments included.
        """
        self.forward_only(True)
        try:
            return self.step(*args, target=target, losses=losses, **kwargs)
        finally:
            self.forward_only(False)

    def close(self) -> None:
        """Leave the pipeline, once all ranks have done their last step. A second call does nothing.

        Raises:
            PipelineAborted: if a rank has failed since the last step.
        """
        self._pipe.close()

    def run_microbatches(
        self,
        arg_mbs: list[Any],
        kwarg_mbs: list[Any],
        target_mbs: list[Any] | None,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
    ) -> None:
        """Run one step; arguments are lists with one entry a microbatch. For `step`, which checks them."""
        self._pipe.check_usable()
        is_last = self._stages[-1].is_last
        has_loss = is_last and self.has_loss and (self.trains or target_mbs is not None)
        if has_loss and target_mbs is None:
            raise ConfigError(
                "target is None, must be the targets on the rank of the last stage, as loss_fn needs them"
            )
        first_target = None if target_mbs is None else target_mbs[0]
        tasks = self._tasks
        tasks.data = StepData(
            arg_mbs,
            kwarg_mbs,
            target_mbs,
            partial(_loss_of, self, loss_kwargs) if has_loss else None,
            return_outputs,
            self._finalizes,
        )
        try:
            if self._shapes_train is not self.trains:  # torch exchanges them
                self._shapes.come()
                self._shapes_train = self.trains
            infer = partial(unwrapped, self.infer_metadata, arg_mbs[0], kwarg_mbs[0], first_target, loss_kwargs)
            self._in_time(self._shapes, infer, self._pipe.calls.check)
            checks.PREPARED.update(dict.fromkeys(self._stages, self.n_microbatches))
            run = self._pipe.calls.step if self.trains else self._pipe.calls.evaluate
            self.last_result = run(microbatches=self.n_microbatches)
        except ConfigError:
            raise
        except BaseException as error:
            self._pipe.fail(error)
            raise
        finally:
            tasks.data = None
        if is_last:
            self._hand_out(losses)

    def _hand_out(self, losses: list[Any] | None) -> None:
        """Pass on what the last stage has kept, in the order of microbatches."""
        tasks = self._tasks
        private.use_here((tasks.step_outputs, tasks.step_losses))
        self._stages[-1].output_chunks = [tasks.step_outputs[m] for m in sorted(tasks.step_outputs)]
        if losses is not None:
            losses[:] = [tasks.step_losses[m] for m in sorted(tasks.step_losses)]
        tasks.step_losses.clear()
        tasks.step_outputs.clear()

    def _in_time(
        self, arrivals: ReceiveWatch, call: Callable[[], Any], check: Callable[[], None] = lambda: None
    ) -> Any:
        """``call``, an exchange, in the caller's modes, under the time limit; ends early if ``check`` raises."""
        modes = CallerModes.capture(Mode.TRAIN if torch.is_grad_enabled() else Mode.FORWARD)
        return within(self._init_timeout, arrivals.name, partial(modes.forward, call), check, arrivals.missing)


def _split_of(options: dict[str, Any]) -> Unsplittable | None:
    """What a split backward does with modules that need a whole one; None where backward is not split."""
    if options.get("split") is not True:
        return None
    # A whole backward in B would add gradients out of the order of Ws.
    return "refuse" if options.get("deterministic") else options.get("unsplittable", "whole")


def _loss_of(schedule: ScheduleRRFP, loss_kwargs: dict[str, Any] | None, output: Any, target: Any) -> Any:
    return schedule.loss(output, target, loss_kwargs)
