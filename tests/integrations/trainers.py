"""A tiny Llama, its data, and the arguments of a `transformers.Trainer` for it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from integrations.decoders import show_no_progress
from torch import Tensor
from torch.utils.data import Dataset

STEPS = 20


def build() -> Any:
    """The same weights in every call; embedding and head are tied."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    show_no_progress()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes))


def with_adapters(model: Any) -> Any:
    """The model with LoRA, whose second matrices are not zero."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # which peft asks for
        return get_peft_model(model, config)


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of 12 tokens, of which the last ones are padding, another number in each."""

    def __init__(self, count: int, shift: int = 0) -> None:
        self.count, self.shift = count, shift

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (torch.arange(12) * (index + 1) + index + self.shift) % 64
        mask = (torch.arange(12) < 12 - index % 7).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def hits(prediction: Any) -> dict[str, float]:
    """The share of labels that the logits at their own place have, which is a figure of all logits."""
    return {"hits": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def data() -> dict[str, Any]:
    """No number of rows is a multiple of a batch; two batches are one step of the optimizer."""
    return {"train_dataset": Rows(52), "eval_dataset": Rows(11, shift=3), "compute_metrics": hits}


def arguments(folder: Path, **further: Any) -> Any:
    from transformers import TrainingArguments

    settings: dict[str, Any] = {"max_steps": STEPS, "learning_rate": 1e-2, "max_grad_norm": 0.5, "warmup_steps": 3}
    settings |= {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 2}
    settings |= {"eval_strategy": "steps", "eval_steps": 10, "save_steps": 10, "logging_steps": 1}
    settings |= {"load_best_model_at_end": True}
    settings |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
    return TrainingArguments(output_dir=str(folder), **settings | further)


def figures(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was logged, without what depends on the machine's speed."""
    timed = ("runtime", "per_second")
    return [{name: value for name, value in each.items() if not name.endswith(timed)} for each in history]
