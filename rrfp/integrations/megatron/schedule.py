"""`MegatronSchedule`: Megatron's ``forward_backward_func`` over RRFP's pipelines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from rrfp import Limit, Pipeline, PipelineAborted, RrfpError, StepResult
from rrfp.errors import ConfigError
from rrfp.integrations.megatron import checks
from rrfp.integrations.megatron.errors import as_runtime_error
from rrfp.integrations.megatron.gradient_sync import GradientSync, ParameterSync
from rrfp.integrations.megatron.meeting import Meeting
from rrfp.integrations.megatron.tasks import ChunkTasks, StepCall, listed_iterators
from rrfp.integrations.megatron.upstream import (
    check_signatures,
    default_groups,
    fitted,
    get_model_config,
    get_model_type,
    schedules,
)
from rrfp.integrations.open_pipeline import OpenPipeline

logger = logging.getLogger(__name__)


class MegatronSchedule:
    """Runs Megatron's model chunks by readiness, with the arguments and results of its pipelined schedules.

    A pipeline is made at the first call with a model, and left when the model goes or the process ends; `close` leaves
    all before. All ranks of a pipeline must make the same calls. Errors are RuntimeErrors, and RRFP's.

    Args:
        limit: how many microbatches a stage may hold: ``"megatron"``, as many as Megatron's own schedule, rounded up to
            whole microbatches where a stage has several chunks; or as `rrfp.Pipeline` takes it, such as ``"2n"``.
        pg_collection: the process groups of calls that pass none; by default those of ``parallel_state``.
        options: of `rrfp.Pipeline`, such as ``hint``, ``transport`` or ``stall_after``.

    Attributes:
        last_result: the `rrfp.StepResult` of the last call, with where its time went; None before.
    """

    def __init__(self, *, limit: Limit | int | str = checks.WINDOW, pg_collection: Any = None, **options: Any) -> None:
        check_signatures(schedules)
        checks.check_options({"limit": limit, **options})
        self.last_result: StepResult | None = None
        self._limit = limit
        self._groups = pg_collection
        self._options = options
        #: By first chunk of a model, its pipelines by all that they depend on.
        self._open: WeakKeyDictionary[nn.Module, dict[Any, _ModelPipeline]] = WeakKeyDictionary()

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: nn.Module | list[nn.Module],
        num_microbatches: int,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run a step, or with ``forward_only`` its forwards.

        The arguments are those of Megatron's ``forward_backward_func``. Shapes travel with the tensors, so
        ``seq_length``, ``micro_batch_size``, ``decoder_seq_length`` and ``adjust_tensor_shapes_fn`` are not used.

        Returns:
            On the last stage, what the loss function gave for each microbatch, in their order; elsewhere nothing.

        Raises:
            MegatronConfigError: for flags and arguments that RRFP does not run, by name.
            MegatronPipelineAborted: on every rank, if one rank failed.
        """
        pipeline: _ModelPipeline | None = None
        try:
            checks.check_groups(p2p_communicator, pg_collection)
            groups = pg_collection or self._groups or default_groups()
            if groups.pp.size() == 1:
                return list(
                    schedules.forward_backward_no_pipelining(
                        forward_step_func=forward_step_func,
                        data_iterator=data_iterator,
                        model=model,
                        num_microbatches=num_microbatches,
                        seq_length=seq_length,
                        micro_batch_size=micro_batch_size,
                        decoder_seq_length=decoder_seq_length,
                        forward_only=forward_only,
                        collect_non_loss_data=collect_non_loss_data,
                        first_val_step=first_val_step,
                        adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
                        pg_collection=pg_collection or self._groups,
                        force_all_reduce=force_all_reduce,
                    )
                )
            chunks = model if isinstance(model, list) else [model]
            iterators = listed_iterators(data_iterator, len(chunks))
            config, model_type = get_model_config(chunks[0]), get_model_type(chunks[0])
            checks.check_config(config)
            checks.check_model(chunks, model_type)
            is_first_stage, is_last_stage = groups.pp.rank() == 0, groups.pp.rank() == groups.pp.size() - 1
            finalizes = config.finalize_model_grads_func is not None and not forward_only
            embedding = None
            if finalizes:
                embedding = fitted(
                    schedules.clear_embedding_activation_buffer,
                    config=config,
                    model=model,
                    is_last_stage=is_last_stage,
                )
            if config.timers is not None:
                config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
            pipeline = self._pipeline(chunks, groups, config)
            call = StepCall(
                chunks=chunks,
                forward_step_func=forward_step_func,
                iterators=iterators,
                config=config,
                microbatches=num_microbatches,
                forward_only=forward_only,
                collect_non_loss_data=collect_non_loss_data,
                first_val_step=first_val_step,
                cp_group_size=groups.cp.size(),
                model_type=model_type,
                gradients=GradientSync(config, chunks, num_microbatches, is_first_stage=is_first_stage),
                parameters=None if forward_only else ParameterSync(config, chunks),
            )
            self.last_result = pipeline.run(call)
        except RrfpError as error:
            raise as_runtime_error(error, () if pipeline is None else pipeline.ranks) from error.__cause__
        if finalizes:
            fitted(
                schedules.finish_embedding_wgrad_compute,
                config=config,
                embedding_module=embedding,
                is_last_stage=is_last_stage,
                tp_group=groups.tp,
            )
            config.finalize_model_grads_func(
                chunks,
                _total(call.tokens, chunks[0]) if config.calculate_per_token_loss else None,
                pg_collection=groups,
                force_all_reduce=force_all_reduce,
            )
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return [entry for m in sorted(call.stored) for entry in call.stored[m]]

    def close(self) -> None:
        """Leave all pipelines, on all their ranks alike."""
        for pipelines in self._open.values():
            for pipeline in pipelines.values():
                pipeline.close()
        self._open.clear()

    def _pipeline(self, chunks: Sequence[nn.Module], groups: Any, config: Any) -> _ModelPipeline:
        pipelines = self._open.setdefault(chunks[0], {})
        # Chunks live as long as the first: they are one model.
        key = (tuple(map(id, chunks)), id(groups.pp))
        if key not in pipelines:
            limit = self._limit
            if limit == checks.WINDOW:
                limit = window(groups.pp.size(), groups.pp.rank(), len(chunks), config)
            pipelines[key] = _ModelPipeline(chunks, Meeting.over(groups, config), {"limit": limit, **self._options})
        return pipelines[key]


class _ModelPipeline:
    """The pipeline of one model, entered in its first step."""

    def __init__(self, chunks: Sequence[nn.Module], meeting: Meeting, options: dict[str, Any]) -> None:
        topology = meeting.topology
        stages, total = len(meeting.ranks), len(meeting.ranks) * len(chunks)
        self.ranks = meeting.ranks
        self._logs = topology.rank == 0
        self._first_chunk = ref(chunks[0])
        self._tasks = ChunkTasks([name_of(chunk) for chunk in chunks], range(topology.stage, total, stages), total)
        device = device_of(chunks)
        if device.type != "cpu":
            options = {"device": device, **options}
        self._pipeline = Pipeline(
            self._tasks, topology=topology, name=meeting.name, chunks=len(chunks), order="natural", **options
        )
        self._opened: OpenPipeline | None = None
        self._was_opened = False

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _entered(self) -> OpenPipeline:
        if self._opened is None:
            what, another = "pipeline of a Megatron model", "call enable() anew, on all ranks"
            if self._was_opened:  # and others may have ended with it: to meet them once more would wait for ever
                raise RrfpError(f"this {what} could not be started; {another}")
            self._was_opened, began = True, time.monotonic()
            self._opened = OpenPipeline(self._pipeline, self._first_chunk(), what, another)
            if self._logs:
                logger.info(
                    "RRFP runs the pipeline of ranks %s, %d chunk(s) each; connecting took %.1f s",
                    [each[0] if len(each) == 1 else list(each) for each in self.ranks],
                    len(self._tasks.names),
                    time.monotonic() - began,
                )
        return self._opened

    def run(self, call: StepCall) -> StepResult:
        opened = self._entered()
        opened.check_usable()
        try:
            with self._tasks.serving(call):
                run = opened.calls.evaluate if call.forward_only else opened.calls.step
                return run(microbatches=call.microbatches)
        except ConfigError:
            raise
        except PipelineAborted as error:
            opened.fail(error)
            raise error.with_traceback(None)  # noqa: B904 - these frames would bury the caller's
        except BaseException as error:
            opened.fail(error)
            raise
        finally:
            call.gradients.close()


def window(stages: int, stage: int, chunks: int, config: Any) -> int:
    """The microbatches that Megatron's own schedule holds on ``stage``, rounded up to whole ones."""
    if chunks == 1:
        return stages - stage
    group: int = config.microbatch_group_size_per_vp_stage or stages
    warmup = 2 * (stages - stage - 1) + (chunks - 1) * group
    return -(-(warmup + 1) // chunks)


def name_of(chunk: nn.Module) -> str:
    """The class of a chunk, without its wrappers."""
    return list(checks.wrapped(chunk))[-1]


def device_of(chunks: Sequence[nn.Module]) -> torch.device:
    """Where a model's parameters are; where it has none, the current CUDA device, if there is one."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            return parameter.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _total(tokens: dict[int, torch.Tensor], chunk: nn.Module) -> torch.Tensor:
    total = torch.zeros([], dtype=torch.int, device=device_of([chunk]))
    for m in sorted(tokens):
        total += tokens[m]
    return total
