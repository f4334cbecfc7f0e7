"""Tiny decoders of transformers in float64, their microbatches, and one step of the whole model in a plain loop."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here comes from a hub; whatever asks one for it fails at once

LAYERS, VOCABULARY = 4, 64

#: What each family needs beside the common settings. Windows are shorter than the microbatches.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 4},
    "gemma2": {"head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 2.0},
    "olmo2": {},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "gpt2": {},
}

#: Families whose layers have routers.
ROUTED = ("qwen3_moe", "mixtral")


def show_no_progress() -> None:
    """Reading and writing models must show no progress bar: it has a thread, which stays."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def config(family: str, **further: Any) -> Any:
    """The configuration of a tiny model; heads are not tied unless ``further`` says so."""
    from transformers import AutoConfig

    show_no_progress()
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": VOCABULARY}
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 32}
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    settings = {**tokens, **sizes, "tie_word_embeddings": False, **FAMILIES.get(family, {}), **further}
    return AutoConfig.for_model(family, **settings)


def build(family: str, *, bare: bool = False, **further: Any) -> Any:
    """A model with random weights, the same in every call.

    Args:
        family: one of `FAMILIES`, or another one.
        bare: without its head.
        further: settings of the configuration.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = (AutoModel if bare else AutoModelForCausalLM).from_config(config(family, **further)).double().train()
        _exact(model)
        with torch.no_grad():  # norms begin with ones, heads of some with zeros
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def skeleton(family: str, **further: Any) -> Any:
    """The model of `build` on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return _exact(AutoModelForCausalLM.from_config(config(family, **further), dtype=torch.float64))


def _exact(model: Any) -> Any:
    """The model, which can compute in float64."""
    if any(name.endswith("experts") for name, _ in model.named_modules()):
        model.set_experts_implementation("eager")  # the grouped product has no float64
    return model


def loaded(folder: Path) -> Any:
    """The model that ``save_pretrained`` wrote there."""
    from transformers import AutoModelForCausalLM

    return _exact(AutoModelForCausalLM.from_pretrained(folder))


@dataclass(frozen=True)
class Batch:
    """A step's microbatches, each of another length, with padded rows.

    Attributes:
        inputs: arguments of the whole model.
        labels: token numbers, -100 for padding.
    """

    inputs: Sequence[dict[str, Tensor]]
    labels: Sequence[Tensor]

    @property
    def weights(self) -> list[float]:
        """How many tokens each microbatch predicts."""
        return [float((labels[:, 1:] != -100).sum()) for labels in self.labels]


def draw(microbatches: int = 4, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = [], []
    for m in range(microbatches):
        tokens = torch.randint(3, VOCABULARY, (1 + m % 3, 6 + 2 * m), generator=generator)
        mask = torch.ones_like(tokens)
        mask[-1, -2:] = 0
        inputs.append({"input_ids": tokens, "attention_mask": mask})
        labels.append(tokens.masked_fill(mask == 0, -100))
    return Batch(inputs, labels)


def draw_packed(microbatches: int = 3, seed: int = 0) -> Batch:
    """Microbatches of one row with two sequences one behind the other, which only their positions tell apart."""
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = [], []
    for m in range(microbatches):
        tokens = torch.randint(3, VOCABULARY, (1, 8 + 2 * m), generator=generator)
        positions = torch.cat([torch.arange(3 + m), torch.arange(5 + m)])[None]
        inputs.append({"input_ids": tokens, "position_ids": positions})
        labels.append(tokens.masked_fill(positions == 0, -100))
    return Batch(inputs, labels)


@dataclass(frozen=True)
class Trained:
    """What a step gave: the losses of its microbatches and the gradients by name."""

    losses: list[float]
    gradients: dict[str, Tensor]


def train_whole(model: Any, batch: Batch, **options: Any) -> Trained:
    """The whole model, a microbatch at a time, called with ``options`` too. Leaves no gradients."""
    losses, total = [], sum(batch.weights)
    for inputs, labels, weight in zip(batch.inputs, batch.labels, batch.weights, strict=True):
        loss = model(**inputs, labels=labels, **options).loss
        (loss * (weight / total)).backward()
        losses.append(loss.item())
    return Trained(losses, take_gradients(model))


def take_gradients(*modules: nn.Module) -> dict[str, Tensor]:
    """The gradients of all parameters by name; they have none afterwards."""
    gradients: dict[str, Tensor] = {}
    for module in modules:
        gradients |= {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    for module in modules:
        module.zero_grad()
    return gradients


def differing(actual: Trained, wanted: Trained) -> list[str]:
    """The names of the gradients, and ``losses``, that are not the same to the bit."""
    names = actual.gradients.keys() ^ wanted.gradients.keys()
    names |= {name for name in wanted.gradients.keys() - names if not _same(name, actual, wanted)}
    return sorted(names) + ["losses"] * (actual.losses != wanted.losses)


def _same(name: str, actual: Trained, wanted: Trained) -> bool:
    return torch.equal(actual.gradients[name], wanted.gradients[name])
