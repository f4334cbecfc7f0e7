"""Modules that `torch.compile` runs as CUDA graphs, which a pipeline cannot: ``mode="reduce-overhead"`` and others.

The outputs of such a graph, and what it saves for its backward, lie in one pool of memory that its next forward writes
anew. A pipeline runs several forwards before their backwards, so they would overwrite each other. torch detects some of
these cases when they occur, so they are refused by name before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from rrfp.errors import ConfigError
from rrfp.graphs.names import TextOf, numbered

# Names of torch that are not documented. Where a version of torch lacks one, nothing is found by it.
_CONFIG_OF = "get_compiler_config"
_COMPILED_CALL = "_compiled_call_impl"
_CONTEXT = "dynamo_ctx"
_BACKEND_OF = "_torchdynamo_orig_backend"
_USES_GRAPHS = "triton.cudagraphs"
_GRAPHS_BACKEND = "cudagraphs"

_PROBLEM = (
    "compiled for CUDA graphs (mode='reduce-overhead' or 'max-autotune', or the option 'triton.cudagraphs'), whose "
    "memory the next forward overwrites before this one's backward: compile with mode='default' or "
    "'max-autotune-no-cudagraphs'"
)


def check_no_cuda_graphs(
    modules: Mapping[int, nn.Module], losses: Iterable[Any] = (), text_of: TextOf = numbered
) -> None:
    """Refuse modules, by virtual stage, and losses that would run as CUDA graphs on a device.

    Raises:
        ConfigError: naming the first submodule that would.
    """
    if any(map(_uses_graphs, losses)):
        raise ConfigError(f"loss_fn is {_PROBLEM}")
    for v, module in sorted(modules.items()):
        for name, submodule in module.named_modules():
            if any(map(_uses_graphs, _compiled(submodule))):
                where = f"in its submodule {name!r}" if name else "as a whole"
                raise ConfigError(f"the module of {text_of(v)}, {where}, is {_PROBLEM}")


def _compiled(module: nn.Module) -> Iterator[Any]:
    """The objects of ``module`` that `torch.compile` may have made: itself, its calls in place, and its forward."""
    yield module
    yield getattr(module, _COMPILED_CALL, None)
    yield getattr(module, "forward", None)


def _uses_graphs(compiled: Any) -> bool:
    config_of = getattr(compiled, _CONFIG_OF, None)
    config = config_of() if callable(config_of) else None
    if isinstance(config, Mapping):
        return bool(config.get(_USES_GRAPHS))
    backend = getattr(getattr(compiled, _CONTEXT, None), "callback", None)
    while (inner := getattr(backend, _BACKEND_OF, None)) is not None:
        backend = inner
    return getattr(backend, "compiler_name", None) == _GRAPHS_BACKEND
