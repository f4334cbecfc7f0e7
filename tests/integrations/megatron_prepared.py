"""Megatron-core on a CPU, with a kernel that it looks for when it is imported: import this before any part of it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from torch import Tensor


def accumulate(inputs: Tensor, gradients: Tensor, main_grad: Tensor) -> None:
    """What Apex's kernel does: adds a weight gradient to ``main_grad``."""
    main_grad.addmm_(gradients.t().to(main_grad.dtype), inputs.to(main_grad.dtype))


def prepare() -> None:
    fused = ModuleType("fused_weight_gradient_mlp_cuda")
    vars(fused).update(wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate)
    sys.modules[fused.__name__] = fused
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import_module("megatron_on_cpu")


prepare()
