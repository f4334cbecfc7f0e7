"""A training by one method: its losses, evaluations, and one digest of all losses and parameters."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.parity.settings import Method, Runtime, Settings

LEARNING_RATE = 3e-3
#: Of the batches of evaluations, which are the same for every seed.
_HELD_OUT = 7_000_000

B = TypeVar("B")
#: By microbatch.
Losses = Sequence[float] | Sequence[Tensor]


class Training(ABC, Generic[B]):
    """What a method trains on this rank."""

    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """Of this rank's stages, in order."""

    @abstractmethod
    def batch(self, seed: int) -> B:
        """The microbatches that ``seed`` gives."""

    @abstractmethod
    def step(self, batch: B) -> Losses:
        """Form the gradients of a batch; the losses by microbatch, on the rank that has them."""

    @abstractmethod
    def evaluate(self, batch: B) -> Losses:
        """Run forwards alone; the losses likewise."""


def train(settings: Settings, method: Method, training: Training[Any] | None) -> dict[str, Any]:
    """Train to the end, on all ranks; a rank that has nothing of the model has no training.

    Returns:
        Each iteration's mean loss, evaluations as pairs of iteration and mean loss, the digest and seconds.
    """
    started, losses, evaluations = time.monotonic(), list[Tensor](), list[Tensor]()
    parameters = [] if training is None else training.parameters()
    if training is not None:
        optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
        for number in range(1, settings.iterations + 1):
            losses.append(_stacked(training.step(training.batch(1_000_000 + 1000 * settings.seed + number))))
            optimizer.step()
            optimizer.zero_grad()
            if number % settings.evaluated_every == 0:
                evaluations.append(_stacked(training.evaluate(training.batch(_HELD_OUT))))
    has_losses = dist.get_rank() == (0 if method.runtime is Runtime.ONE_PROCESS else dist.get_world_size() - 1)
    own = {"parameters": parameters, "losses": (losses, evaluations) if has_losses else None}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {**own, "parameters": [parameter.detach() for parameter in parameters]})
    [(losses, evaluations)] = [part["losses"] for part in parts if part["losses"] is not None]
    every = (*losses, *evaluations, *(each for part in parts for each in part["parameters"]))
    numbers = range(settings.evaluated_every, settings.iterations + 1, settings.evaluated_every)
    return {
        "losses": [float(each.mean()) for each in losses],
        "evaluations": [(n, float(each.mean())) for n, each in zip(numbers, evaluations, strict=True)],
        "sha256": digest_of(every),
        "seconds": time.monotonic() - started,
    }


def digest_of(tensors: Sequence[Tensor] | Iterator[Tensor]) -> str:
    """Of the bits of all tensors in order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _stacked(losses: Losses) -> Tensor:
    numbers = [float(loss.detach()) if isinstance(loss, Tensor) else loss for loss in losses]
    return torch.tensor(numbers, dtype=torch.float64)
