"""All names of torch that are needed and not public: those of ``torch.distributed.pipelining`` and of FSDP2.

The tests run them on the installed torch, and compare them with the committed list of names and signatures of a later
one (`tests/integrations/torch_names.json`). Where the two differ, a comment here says so.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining._utils import PipeliningMetadataError
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _split_tensor
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _Action, _ComputationType
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from rrfp.errors import PipelineAborted
from rrfp.integrations.buffers import restored_buffers

#: Names a region for profilers. That of ``torch.profiler`` takes several microseconds also while none runs.
record_function: Callable[[str], AbstractContextManager[Any]]
try:
    from torch._C._profiler import _RecordFunctionFast as record_function
except ImportError:
    record_function = torch.profiler.record_function

#: A stage: `PipelineStage`, or the tracer's.
Stage = _PipelineStageBase


class ScheduleAborted(PipelineAborted, RuntimeError):
    """What `ScheduleRRFP` raises for a `PipelineAborted`: torch's schedules raise RuntimeErrors."""

    @classmethod
    def of(cls, error: PipelineAborted) -> ScheduleAborted:
        """The same error, of torch's type for other metadata where that is the cause, on any rank."""
        is_of_metadata = error.origin.cause.startswith(f"{PipeliningMetadataError.__name__}:")
        made = (MetadataAborted if is_of_metadata else cls)(error.origin)
        for note in getattr(error, "__notes__", ()):
            made.add_note(note)
        return made


class MetadataAborted(ScheduleAborted, PipeliningMetadataError):
    """For a tensor of another shape, dtype or stride than torch's stages expect."""


class TorchSchedule(PipelineScheduleMulti):
    """The part of torch's schedules that `ScheduleRRFP` keeps, under names without an underscore."""

    _n_microbatches: int
    _has_backward: bool
    _stages: list[Stage]

    @property
    def n_microbatches(self) -> int:
        return self._n_microbatches

    @property
    def trains(self) -> bool:
        """Whether the step that runs has a backward: there is a ``loss_fn``, and it is no `eval`."""
        return self._has_backward

    @property
    def has_loss(self) -> bool:
        return self._loss_fn is not None

    @property
    def needs_grad_mode(self) -> bool:
        """Whether a backward needs autograd; not so with a ``backward_requires_autograd`` of False."""
        return self._backward_requires_autograd

    def forward_only(self, value: bool) -> None:
        """Let the next step have no backward, or have one again."""
        self._has_backward = not value and self.has_loss

    def split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[list[Any], list[Any], list[Any] | None]:
        """A whole batch as microbatches: positional arguments, keyword arguments, targets."""
        args_split, kwargs_split = self._split_inputs(args, kwargs)
        if target is None:
            return args_split, kwargs_split, None
        along_batch = TensorChunkSpec(0)  # type: ignore[no-untyped-call]
        return args_split, kwargs_split, list(_split_tensor(target, along_batch, self._n_microbatches))

    def merge(self, outputs: list[Any]) -> Any:
        """The outputs of the microbatches as one batch; a ValueError if their shapes do not allow it."""
        try:
            return self._merge_outputs(outputs)
        except RuntimeError as error:
            raise ValueError(
                f"the step is done, but its outputs make no batch: pass return_outputs=False ({error})"
            ) from error

    def loss(self, output: Any, target: Any, loss_kwargs: dict[str, Any] | None) -> Any:
        return self._compute_loss(output, target, loss_kwargs)  # type: ignore[no-untyped-call]

    def infer_metadata(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, loss_kwargs: dict[str, Any] | None
    ) -> None:
        """Let the stages of all ranks find the shapes of what they exchange, once in each mode; blocks until all do."""
        with ExitStack() as stack:
            for stage in self._stages:
                # Or DDP would take the first backward of the step for the one behind this forward, and reduce in it.
                if isinstance(stage.submod, DistributedDataParallel):
                    stack.enter_context(stage.submod.no_sync())
            # On later ranks torch calls the modules with memory that nobody has filled.
            stack.enter_context(restored_buffers(stage.submod for stage in self._stages))
            self._initialize_stages(args, kwargs, target, loss_kwargs)
        for stage in self._stages:
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                _release(infos)

    def map_stages(self, rank_of: Mapping[int, int]) -> None:
        """Set the rank of every stage, and an order of tasks for torch's printers and simulators.

        Tasks do not run in that order, which is GPipe's: the deepest chunk first in backward.
        """
        forward, backward = _ComputationType.FORWARD, _ComputationType.FULL_BACKWARD
        held = {rank: sorted(v for v, at in rank_of.items() if at == rank) for rank in sorted(set(rank_of.values()))}
        microbatches = range(self._n_microbatches)
        self.pipeline_order = {
            rank: [
                *(_Action(v, forward, m) for v in stages for m in microbatches),
                *(_Action(v, backward, m) for v in reversed(stages) for m in microbatches),
            ]
            for rank, stages in held.items()
        }
        self.stage_index_to_group_rank = dict(rank_of)
        for stage in self._stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank

    @abstractmethod
    def run_microbatches(
        self,
        arg_mbs: list[Any],
        kwarg_mbs: list[Any],
        target_mbs: list[Any] | None,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
    ) -> None:
        """Run one step; arguments are lists with one entry a microbatch."""

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        args, kwargs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        self.run_microbatches(args, kwargs, target_mbs, losses, return_outputs, loss_kwargs)


# Tensors of one microbatch.


def local_shard(tensor: Tensor | None) -> Tensor | None:
    """This rank's shard of a DTensor, without a history; it requires grad if the DTensor does. Others unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    detached: Any = tensor.detach()
    shard: Tensor = detached.to_local()
    return shard.requires_grad_(tensor.requires_grad)


def tensors_in(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(filter(torch.is_tensor, tree_leaves(value)))


def use_here(value: Any) -> None:
    """Keep the memory of the tensors in ``value``, which another stream has filled, until this stream is done."""
    for tensor in tensors_in(value):
        shard = local_shard(tensor)
        assert shard is not None
        if shard.is_cuda:
            shard.record_stream(torch.cuda.current_stream(shard.device))


def is_plain_scalar(value: Any) -> bool:
    """Whether ``value`` is a tensor with one element, and no DTensor, whose value may need a collective."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.numel() == 1


def outputs_of(output: Any) -> tuple[Any, ...]:
    """The outputs of a stage as a tuple; a module of the tracer returns several as a list."""
    return tuple(output) if type(output) in (tuple, list) else (output,)


def put_inputs(stage: Stage, microbatch: int, tensors: tuple[Tensor | None, ...]) -> None:
    stage.set_local_fwd_input(tensors, microbatch)


def drop_inputs(stage: Stage, microbatch: int) -> None:
    """Forget the inputs of ``microbatch``; its graph keeps them as long as the backward needs them."""
    _release(stage.args_recv_info[microbatch])


def put_gradients(stage: Stage, microbatch: int, gradients: tuple[Tensor | None, ...]) -> None:
    """Let the next backward of ``microbatch`` use these gradients of its outputs; None stands for zeros."""
    infos = stage.grad_recv_info[microbatch]
    expected: list[Tensor | None] = []
    for info, gradient in zip(infos, gradients, strict=True):
        meta = info.tensor_meta
        if meta is None:  # the metadata inference saw none
            expected.append(None)
        elif gradient is None:
            expected.append(torch.zeros(meta.shape, dtype=meta.dtype, device=stage.device))
        else:
            expected.append(gradient)
    stage.set_local_bwd_input(tuple(expected), microbatch)


def take_gradients(stage: Stage, microbatch: int) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs of ``microbatch``, whose backward has run; none on the first stage."""
    if not stage.is_last:
        _release(stage.grad_recv_info[microbatch])
    if stage.is_first:  # torch keeps them until the next step
        stage.bwd_cache.pop(microbatch, None)
        return ()
    gradients: tuple[Tensor | None, ...] = stage.get_local_bwd_output(microbatch)  # type: ignore[no-untyped-call]
    return gradients


#: B of `rrfp.SplitBackward`: roots, their gradients, inputs.
InputGradients = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], None]


def backward_one_chunk(stage: Stage, microbatch: int, loss: Tensor | None, run: InputGradients) -> None:
    """As the stage's own, with ``run`` in place of torch's backward."""

    def differentiate(_: str, arguments: Mapping[str, Any], **__: Any) -> tuple[tuple[Tensor | None, ...], None]:
        outputs, values = outputs_of(arguments["stage_output"]), arguments["input_values"]
        if loss is not None and loss.numel() != 1:
            raise RuntimeError(f"the loss is of shape {tuple(loss.shape)}, must be a scalar")
        gradients = [torch.ones_like(loss)] if loss is not None else arguments["output_grads"]
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if output.requires_grad and gradient is not None
        ]
        leaves = [value for value in values if isinstance(value, Tensor) and value.is_leaf and value.requires_grad]
        with unreduced(stage):
            run([output for output, _ in pairs], [gradient for _, gradient in pairs], leaves)
        sent = tuple(value.grad if isinstance(value, Tensor) and value.is_leaf else None for value in values)
        for leaf in leaves:  # as torch does
            leaf.grad = None
        return sent, None

    # Why not the stage's attributes around it? They are private, too, and more of them.
    vars(stage)["backward_maybe_with_nosync"] = differentiate
    try:
        stage.backward_one_chunk(microbatch, loss=loss, full_backward=True, last_backward=False)
    finally:
        del vars(stage)["backward_maybe_with_nosync"]


@contextmanager
def unreduced(stage: Stage) -> Iterator[None]:
    """Within, a backward through the stage's module reduces no gradients and frees no parameters."""
    module = stage.submod
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(False)
    with module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext():
        yield


def _release(infos: Sequence[Any]) -> None:
    """Drop buffers: torch 2.13 keeps one for each microbatch from the first step on, 2.15 none between tasks."""
    for info in infos:
        if not info.is_root_arg and info.buffer is not None:
            info.buffer = None


# Modules of other makes.


def resharded(module: nn.Module) -> Iterator[str]:
    """The names of the FSDP2 modules in ``module`` that free their parameters after each forward."""
    for name, part in module.named_modules():
        if not isinstance(part, FSDPModule):
            continue
        state = _state_of(part)
        if not name and state._auto_reshard_after_forward:  # the root keeps them, which FSDP sets at a forward
            continue
        if any(group.post_forward_mesh_info is not None for group in state._fsdp_param_groups):
            yield name


def _state_of(module: FSDPModule) -> Any:
    return module._get_fsdp_state()


def sharded_otherwise(module: nn.Module) -> Iterator[tuple[str, frozenset[int]]]:
    """The names and ranks of parameters that are DTensors on several ranks, beyond FSDP2's own dims of the mesh."""
    own: dict[int, Any] = {}
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in _state_of(part)._fsdp_param_groups:
                for each in group.fsdp_params:
                    own[id(each.sharded_param)] = group.mesh_info.mesh
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1:
            mesh, whole = own.get(id(parameter)), parameter.device_mesh
            if mesh is None or mesh.size() != whole.size():
                fixed = () if mesh is None else mesh.mesh_dim_names or ()
                at = zip(whole.mesh_dim_names or ("",) * whole.ndim, whole.get_coordinate() or (), strict=True)
                others = tuple([index if dim in fixed else slice(None) for dim, index in at])
                yield name, frozenset(whole.mesh[others].flatten().tolist())


def reduce_ddp(stage: Stage) -> None:
    """Let DDP sum what ``.grad`` holds over its replicas.

    DDP reduces in the hooks of a backward. The backwards of the microbatches run without them, since chunks finish in
    another order on each replica; a backward of zeros then calls them.
    """
    nothing = [parameter.view(-1)[:0].sum() for parameter in stage.submod.parameters() if parameter.requires_grad]
    backward: dict[str, Any] = {"stage_output": sum(nothing[1:], nothing[0]), "output_grads": None, "input_values": []}
    stage.backward_maybe_with_nosync("full", backward, last_backward=True)


def mesh_of(stage: Stage, dims: tuple[str, ...]) -> DeviceMesh | None:
    """The mesh of these dims, which the stage's ``get_mesh`` gives; None where it has none of them."""
    try:
        mesh: DeviceMesh = stage._mesh_cache.get_mesh((dims, None))
    except (ValueError, PipeliningMetadataError):
        return None
    return mesh
