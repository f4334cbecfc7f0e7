"""Modules compiled for CUDA graphs are found in whatever way they were compiled, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from runtime.host_device import CudaLike
from torch import Tensor, nn

import rrfp
from rrfp.errors import ConfigError
from rrfp.pipeline.device_choice import check_no_cuda_graphs

#: torch's own, at the first import of its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def in_place(**options: Any) -> nn.Module:
    module = nn.Linear(2, 2)
    module.compile(**options)
    return module


class Forward(nn.Module):
    """Compiles its own forward."""

    forward: Any

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.forward = torch.compile(self.run, **options)

    def run(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


def wrapped(**options: Any) -> nn.Module:
    module: Any = torch.compile(nn.Linear(2, 2), **options)
    assert isinstance(module, nn.Module)
    return module


WITH_GRAPHS: list[dict[str, Any]] = [
    {"mode": "reduce-overhead"},
    {"mode": "max-autotune"},
    {"options": {"triton.cudagraphs": True}},
]
WITHOUT: list[dict[str, Any]] = [
    {},
    {"mode": "max-autotune-no-cudagraphs"},
    {"backend": "eager"},
    {"backend": "aot_eager"},
]


@pytest.mark.parametrize("how", [wrapped, in_place, Forward])
@pytest.mark.parametrize("options", WITH_GRAPHS, ids=str)
def test_a_submodule_compiled_for_graphs_is_refused_by_name(
    how: Callable[..., nn.Module], options: dict[str, Any]
) -> None:
    module = nn.Sequential(nn.Tanh(), how(**options))
    where = "in its submodule '1'"
    with pytest.raises(ConfigError, match=rf"the module of virtual stage 3, {where}, is compiled for CUDA graphs"):
        check_no_cuda_graphs({1: nn.Linear(2, 2), 3: module})
    with pytest.raises(ConfigError, match="virtual stage 0, as a whole, is compiled for CUDA graphs"):
        check_no_cuda_graphs({0: how(**options)})


def test_the_backend_for_graphs_alone_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="CUDA graphs"):
        check_no_cuda_graphs({0: wrapped(backend="cudagraphs")})


@pytest.mark.parametrize("how", [wrapped, in_place, Forward])
@pytest.mark.parametrize("options", WITHOUT, ids=str)
def test_other_modes_are_fine(how: Callable[..., nn.Module], options: dict[str, Any]) -> None:
    check_no_cuda_graphs({0: nn.Sequential(how(**options))})


def test_a_pipeline_refuses_it_on_cuda_and_only_there() -> None:
    modules = [nn.Linear(2, 2), wrapped(mode="reduce-overhead")]
    rrfp.local(modules)
    with pytest.raises(ConfigError, match="virtual stage 1, as a whole, is compiled for CUDA graphs"):
        rrfp.local(modules, device=CudaLike())
    loss_fn = torch.compile(nn.functional.mse_loss, mode="reduce-overhead")
    with pytest.raises(ConfigError, match="loss_fn is compiled for CUDA graphs"):
        rrfp.local(modules[:1], device=CudaLike(), loss_fn=loss_fn)
