"""The models by name, and in which configurations they train. Importing this imports no library of models."""

from __future__ import annotations

import importlib
import os
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from models.case import Case
from torch import nn

from rrfp.pipeline.options import OptionArguments

#: Each is the file of that name in this folder, with how many stages it is cut into.
STAGES = {
    "assigned": 3,
    "bert": 2,
    "clip": 2,
    "dit": 2,
    "gpt2": 4,
    "llama": 3,
    "llava": 3,
    "lora": 3,
    "mamba": 2,
    "mixtral": 2,
    "packed": 2,
    "qwen2": 2,
    "resnet": 3,
    "rotary": 3,
    "t5": 4,
    "unet": 3,
    "vit": 3,
    "whisper": 2,
}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """How a pipeline runs.

    Attributes:
        hint: its name; None for the default, which is given the sizes of microbatches.
        split: whether backward is split.
        defer_all: whether weight gradients are deferred however small; else those of these models are formed in B.
        deterministic: as in `PipelineOptions`.
    """

    hint: str | None = None
    split: bool = False
    defer_all: bool = False
    deterministic: bool = False

    def options(self, case: Case) -> OptionArguments:
        """The options of `rrfp.local` and `rrfp.Pipeline`."""
        return {
            "hint": self.hint,
            "split": self.split,
            "deterministic": self.deterministic,
            "loss_fn": case.loss,
        }


_BASES = {
    "bf": Configuration(hint="bf"),
    "bfw": Configuration(hint="bfw", split=True),
    "bfw-deferred": Configuration(hint="bfw", split=True, defer_all=True),
    "default": Configuration(),
}
CONFIGURATIONS = {
    **_BASES,
    **{f"{name}-deterministic": replace(base, deterministic=True) for name, base in _BASES.items()},
}


#: Those that write buffers without a batch norm, which ``deterministic=True`` refuses.
WITHOUT_ORDER = {"rotary"}


def runs() -> list[tuple[str, str]]:
    """Each model in each configuration that takes it."""
    return [
        (model, name)
        for model in STAGES
        for name, configuration in CONFIGURATIONS.items()
        if not (configuration.deterministic and model in WITHOUT_ORDER)
    ]


def load(name: str) -> Case:
    """The case of that name, which imports its library."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here comes from a hub; whatever asks one for it fails at once
    case: Case = importlib.import_module(f"models.{name}").CASE
    return case


def build(case: Case) -> Any:
    """The whole model in float64 and train mode, the same in every call.

    Noise goes on every parameter: where libraries start with zeros or tiny values, gradients would vanish.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random.seed(0)
        model = case.build().double().train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def stages_of(case: Case, model: nn.Module) -> list[nn.Module]:
    """The stages of ``model``; together they have each parameter that learns."""
    stages = list(case.cut(model))
    held = {id(parameter) for stage in stages for parameter in stage.parameters()}
    missing = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in held
    ]
    assert not missing, f"no stage has {', '.join(missing)}"
    return stages
