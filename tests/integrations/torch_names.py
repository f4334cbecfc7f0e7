"""The names of torch on which `rrfp.integrations.torch` stands, how each is used, and what a source tree says of them.

``python tests/integrations/torch_names.py TREE VERSION`` writes `torch_names.json` for the torch that lies in TREE (a
folder that holds ``torch``, such as an unpacked wheel): names and parameters, read from the syntax trees.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Call:
    """A call: so many positional arguments (without self), and these keywords."""

    positional: int
    keywords: tuple[str, ...] = ()

    def fits(self, parameters: Mapping[str, Any]) -> bool:
        """Whether a function with these parameters takes the call."""
        names, required = parameters["names"], parameters["required"]
        passed = {*names[: self.positional], *self.keywords}
        fits = self.positional <= len(names) or parameters["any"]
        return fits and set(required) <= passed and (passed <= set(names) or parameters["any"])


_STAGE = "distributed/pipelining/stage.py:_PipelineStageBase."
_SCHEDULE = "distributed/pipelining/schedules.py:_PipelineSchedule."
_MULTI = "distributed/pipelining/schedules.py:PipelineScheduleMulti."
_GROUP = "distributed/fsdp/_fully_shard/_fsdp_param_group.py:FSDPParamGroup."

#: Functions and methods, by file and name.
CALLS = {
    f"{_MULTI}__init__": Call(9),
    f"{_MULTI}_initialize_stages": Call(4),
    f"{_MULTI}_step_microbatches": Call(6),
    f"{_SCHEDULE}_split_inputs": Call(2),
    f"{_SCHEDULE}_merge_outputs": Call(1),
    f"{_SCHEDULE}_compute_loss": Call(3),
    f"{_SCHEDULE}_check_inputs": Call(4),
    f"{_STAGE}set_local_fwd_input": Call(2),
    f"{_STAGE}set_local_bwd_input": Call(2),
    f"{_STAGE}get_local_bwd_output": Call(1),
    f"{_STAGE}clear_runtime_states": Call(0),
    f"{_STAGE}perform_reduce_grad": Call(1),
    f"{_STAGE}forward_one_chunk": Call(3, ("save_forward_output",)),
    f"{_STAGE}backward_one_chunk": Call(1, ("loss", "full_backward", "last_backward")),
    f"{_STAGE}backward_weight_one_chunk": Call(1, ("last_backward",)),
    f"{_STAGE}backward_maybe_with_nosync": Call(2, ("last_backward",)),
    "distributed/pipelining/microbatch.py:_split_tensor": Call(3),
    "distributed/pipelining/microbatch.py:TensorChunkSpec.__init__": Call(1),
    "distributed/fsdp/_fully_shard/_fully_shard.py:FSDPModule._get_fsdp_state": Call(0),
    "nn/parallel/distributed.py:DistributedDataParallel.no_sync": Call(0),
    "utils/_pytree.py:tree_leaves": Call(1),
}

#: Attributes, which a method of the class or its body sets, or properties.
ATTRIBUTES = (
    *(f"{_SCHEDULE}{name}" for name in ("_n_microbatches", "_has_backward", "_loss_fn", "scale_grads")),
    *(f"{_MULTI}{name}" for name in ("_stages", "_backward_requires_autograd", "pipeline_order")),
    f"{_MULTI}stage_index_to_group_rank",
    *(
        f"{_STAGE}{name}"
        for name in (
            *("submod", "stage_index", "num_stages", "device", "group", "group_rank", "group_size", "dw_builder"),
            *("has_backward", "is_first", "is_last", "output_chunks", "stage_index_to_group_rank", "bwd_cache"),
            *("args_recv_info", "grad_recv_info", "_mesh_cache"),
        )
    ),
    *(f"distributed/pipelining/schedules.py:_Action.{name}" for name in ("stage_index", "computation_type")),
    *(f"distributed/pipelining/schedules.py:_ComputationType.{name}" for name in ("FORWARD", "FULL_BACKWARD")),
    "distributed/fsdp/_fully_shard/_fsdp_state.py:FSDPState._auto_reshard_after_forward",
    "distributed/fsdp/_fully_shard/_fsdp_state.py:FSDPState._fsdp_param_groups",
    *(f"{_GROUP}{name}" for name in ("post_forward_mesh_info", "fsdp_params", "mesh_info")),
    "distributed/fsdp/_fully_shard/_fsdp_param.py:FSDPParam.sharded_param",
)

#: Names with another way where a torch lacks them; only the installed one is asked.
OPTIONAL = ("torch._C._profiler._RecordFunctionFast",)

#: The class that describes a received tensor: 2.13 has it beside the stages, 2.15 in a file of its own.
RECEIVE_INFO = ("distributed/pipelining/stage.py", "distributed/pipelining/_recv_buffers.py")
RECEIVE_ATTRIBUTES = ("buffer", "tensor_meta", "is_root_arg")


@cache
def _classes(file: Path) -> dict[str, ast.AST]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {"": tree, **{node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}}


def parameters_of(torch: Path, name: str) -> dict[str, Any]:
    """The parameters of a function, without self; the last definition counts, behind overloads."""
    file, _, path = name.partition(":")
    owner, _, function = path.rpartition(".")
    nodes = _classes(torch / file)[owner].body  # type: ignore[attr-defined]
    *_, found = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == function)
    arguments = found.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args) if argument.arg != "self"]
    optional = positional[len(positional) - len(arguments.defaults) :]
    keywords = {a.arg: default for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)}
    required = [each for each in positional if each not in optional]
    required += [name for name, default in keywords.items() if default is None]
    return {"names": [*positional, *keywords], "required": required, "any": bool(arguments.kwarg or arguments.vararg)}


def attributes_of(torch: Path, owner: str) -> set[str]:
    """The attributes that the body of a class or its methods set, and its properties."""
    file, _, name = owner.partition(":")
    return set(_attributes(_classes(torch / file)[name]))


def _attributes(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        match each:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.FunctionDef(name=name) if each.decorator_list:
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                yield name


def facts(torch: Path) -> dict[str, Any]:
    """What the source of ``torch``, its folder, says of the names above."""
    homes = [file for file in RECEIVE_INFO if (torch / file).exists() and "_RecvInfo" in _classes(torch / file)]
    owners = {name.rpartition(".")[0] for name in ATTRIBUTES}
    held = {owner: attributes_of(torch, owner) for owner in owners}
    return {
        "calls": {name: parameters_of(torch, name) for name in CALLS},
        "attributes": [name for name in ATTRIBUTES if name.rpartition(".")[2] in held[name.rpartition(".")[0]]],
        "receive_info": sorted(attributes_of(torch, f"{homes[0]}:_RecvInfo") & set(RECEIVE_ATTRIBUTES)),
    }


if __name__ == "__main__":
    tree, version = Path(sys.argv[1]) / "torch", sys.argv[2]
    LIST.write_text(json.dumps({"torch": version, **facts(tree)}, indent=1, sort_keys=True) + "\n")
