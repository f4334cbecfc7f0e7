"""Megatron-core, as far as the integration uses it: every name of it stands here.

Versions are told apart by the arguments of their functions, never by number: a call passes those of its arguments that
the function has a parameter for (`fitted`), and a function that asks for another one is refused (`check_signatures`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch.distributed as dist

from rrfp.errors import ConfigError, Faults

try:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_model_config, get_model_type
except ImportError as error:
    raise ConfigError(f"megatron-core cannot be imported ({error}): pip install 'rrfp[megatron]'") from error

__all__ = [
    "PARAMETERS",
    "PIPELINED",
    "check_signatures",
    "default_groups",
    "expert_group",
    "fitted",
    "get_model_config",
    "get_model_type",
    "schedules",
    "tensor_and_context_group",
]

#: The functions that `enable` replaces.
PIPELINED = ("forward_backward_pipelining_without_interleaving", "forward_backward_pipelining_with_interleaving")

#: By function of ``schedules``, what a call can pass.
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "forward_step": (
        *("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor", "forward_data_store"),
        *("config", "cp_group_size", "collect_non_loss_data", "checkpoint_activations_microbatch"),
        *("is_first_microbatch", "current_microbatch", "vp_stage", "is_last_stage"),
    ),
    "backward_step": ("input_tensor", "output_tensor", "output_tensor_grad", "model_type", "config"),
    "check_first_val_step": ("first_val_step", "forward_only", "cond"),
    "deallocate_output_tensor": ("out", "deallocate_pipeline_outputs"),
    "clear_embedding_activation_buffer": ("config", "model", "is_last_stage"),
    "finish_embedding_wgrad_compute": ("config", "embedding_module", "is_last_stage", "tp_group"),
}


def check_signatures(home: Any) -> None:
    """Raise a ConfigError for a function of ``home``, Megatron's schedules, that no call here can serve."""
    with Faults() as faults:
        for name, known in PARAMETERS.items():
            function = getattr(home, name, None)
            lacking = ["it is missing"] if function is None else _unknown(function, known)
            if lacking:
                faults.keep(
                    f"megatron-core: schedules.{name} is not one that RRFP can call: {', '.join(lacking)}; take a "
                    "version that docs/how-to/megatron.md names"
                )


def _unknown(function: Callable[..., Any], known: tuple[str, ...]) -> list[str]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each for each in inspect.signature(function).parameters.values() if each.default is each.empty]
    return [f"it needs {each.name!r}" for each in needed if each.name not in known and each.kind not in variadic]


def fitted(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call ``function`` with those of the arguments that it has a parameter for."""
    taken = _taken(function)
    return function(**{name: value for name, value in arguments.items() if name in taken})


@lru_cache(maxsize=64)
def _taken(function: Callable[..., Any]) -> frozenset[str]:
    parameters = inspect.signature(function).parameters
    return frozenset(parameters)


def default_groups() -> Any:
    """The process groups of ``parallel_state``, as Megatron's own schedules collect them."""
    build = getattr(schedules, "_build_default_pg_collection", None)
    if build is not None:
        return build()
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return groups


def tensor_and_context_group(groups: Any) -> dist.ProcessGroup:
    """The ranks that share the tasks of a microbatch: tensor and context parallelism."""
    if groups.cp.size() == 1:
        group: dist.ProcessGroup = groups.tp
    elif groups.tp.size() == 1:
        group = groups.cp
    else:
        group = getattr(groups, "tp_cp", None) or parallel_state.get_tensor_and_context_parallel_group()
    return group


def expert_group(groups: Any) -> dist.ProcessGroup:
    group: dist.ProcessGroup | None = getattr(groups, "tp_ep", None)
    return parallel_state.get_expert_tensor_and_model_parallel_group() if group is None else group
