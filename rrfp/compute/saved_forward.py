"""The state that a forward saves for its backward: received inputs, and where backward enters the autograd graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rrfp.compute.engine import Root
from rrfp.compute.payload import Payload
from rrfp.compute.received import Received
from rrfp.errors import StageError


class _Output(NamedTuple):
    """A sent tensor, without its memory.

    Attributes:
        edge: its gradient edge.
        shape: its shape.
        dtype: its dtype.
        device: its device.
    """

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def gradient(self, received: Tensor) -> Tensor:
        """The received gradient where autograd wants it; it may come from a stage that computes on another device."""
        if received.shape != self.shape or received.is_complex() != self.dtype.is_complex:
            raise StageError(
                f"a gradient of shape {tuple(received.shape)} and {received.dtype} arrived for an output of shape "
                f"{tuple(self.shape)} and {self.dtype}"
            )
        return received if received.device == self.device else received.to(self.device)


@dataclass(frozen=True, slots=True)
class SavedForward:
    """One microbatch on one virtual stage, between F and B.

    Attributes:
        received: the input leaves, which collect the input gradients.
        outputs: the sent tensors, None for one that does not require grad. Empty on the last virtual stage.
        loss: the loss with its graph, on the last virtual stage; None if its weight is 0.
        loss_weight: the factor on the loss in backward.
        unweighted: outputs of the last virtual stage whose loss has weight 0 and whose backward runs all the same.
    """

    received: Received
    outputs: tuple[_Output | None, ...] = ()
    loss: Tensor | None = None
    loss_weight: float = 0.0
    unweighted: tuple[Tensor, ...] = ()

    @classmethod
    def of_outputs(cls, received: Received, outputs: Sequence[Tensor | None]) -> SavedForward:
        """For a virtual stage that sends ``outputs``."""
        # Why not keep the tensors? An edge refers to the graph alone, so an output is freed once it is sent, unless
        # autograd itself saved it.
        saved = [
            _Output(get_gradient_edge(t), t.shape, t.dtype, t.device) if t is not None and t.requires_grad else None
            for t in outputs
        ]
        return cls(received, tuple(saved))

    def roots(self, grads: Iterable[Payload]) -> tuple[list[Root], list[Tensor]]:
        """Where backward enters the graph, and the gradient for each entry; a root may occur several times.

        Args:
            grads: the received gradients of the outputs, one payload for each successor.

        Raises:
            StageError: if a payload has not one gradient, or None, for each tensor that was sent, of its shape.
        """
        if self.loss is not None:
            if not self.loss.requires_grad:
                return [], []
            return [self.loss], [torch.full_like(self.loss, self.loss_weight)]
        roots: list[Root] = [*self.unweighted]
        gradients = [torch.zeros_like(output) for output in self.unweighted]
        for payload in grads:
            if len(payload.tensors) != len(self.outputs):
                raise StageError(
                    f"{len(payload.tensors)} gradients arrived, must be one for each tensor sent: {len(self.outputs)}"
                )
            for output, gradient in zip(self.outputs, payload.tensors, strict=True):
                if output is not None and gradient is not None:
                    roots.append(output.edge)
                    gradients.append(output.gradient(gradient))
        return roots, gradients
