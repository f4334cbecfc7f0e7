"""Megatron-core on a CPU, with what its rarer features look for: import this before any part of it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def accumulate(inputs: Tensor, gradients: Tensor, main_grad: Tensor) -> None:
    """What Apex's kernel does: adds a weight gradient to ``main_grad``."""
    main_grad.addmm_(gradients.t().to(main_grad.dtype), inputs.to(main_grad.dtype))


class Autocast(torch.autocast):
    """Of the CPU, where one of CUDA is asked for."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def prepare() -> None:
    fused = ModuleType("fused_weight_gradient_mlp_cuda")
    vars(fused).update(wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate)
    sys.modules[fused.__name__] = fused
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import_module("megatron_on_cpu")
    torch.autocast, torch.cuda.set_rng_state = Autocast, torch.set_rng_state  # type: ignore[misc, assignment]


prepare()
