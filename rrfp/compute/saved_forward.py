"""The state that a forward saves for its backward: received inputs, and where backward enters the autograd graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rrfp.compute.payload import Payload
from rrfp.compute.received import Received
from rrfp.compute.split.backward import Root
from rrfp.errors import StageError


@dataclass(frozen=True, slots=True)
class SavedForward:
    """One microbatch on one virtual stage, between F and B.

    Attributes:
        received: the input leaves, which collect the input gradients.
        edges: the gradient edge of each sent tensor, None if it does not require grad. Empty on the last virtual stage.
        devices: of the sent tensors.
        loss: the loss with its graph, on the last virtual stage; None if its weight is 0.
        loss_weight: the factor on the loss in backward.
        unweighted: outputs of the last virtual stage whose loss has weight 0 and whose backward runs all the same.
    """

    received: Received
    edges: tuple[GradientEdge | None, ...] = ()
    devices: tuple[torch.device | None, ...] = ()
    loss: Tensor | None = None
    loss_weight: float = 0.0
    unweighted: tuple[Tensor, ...] = ()

    @classmethod
    def of_outputs(cls, received: Received, outputs: Sequence[Tensor | None]) -> SavedForward:
        """For a virtual stage that sends ``outputs``."""
        # Why not keep the tensors? An edge refers to the graph alone, so an output is freed once it is sent, unless
        # autograd itself saved it.
        edges = [get_gradient_edge(t) if t is not None and t.requires_grad else None for t in outputs]
        devices = [None if t is None else t.device for t in outputs]
        return cls(received, tuple(edges), tuple(devices))

    def roots(self, grads: Iterable[Payload]) -> tuple[list[Root], list[Tensor]]:
        """Where backward enters the graph, and the gradient for each entry; a root may occur several times.

        Args:
            grads: the received gradients of the outputs, one payload for each successor.

        Raises:
            StageError: if a payload has not one gradient, or None, for each tensor that was sent.
        """
        if self.loss is not None:
            if not self.loss.requires_grad:
                return [], []
            return [self.loss], [torch.full_like(self.loss, self.loss_weight)]
        roots: list[Root] = [*self.unweighted]
        gradients = [torch.zeros_like(output) for output in self.unweighted]
        for payload in grads:
            if len(payload.tensors) != len(self.edges):
                raise StageError(
                    f"{len(payload.tensors)} gradients arrived, must be one for each tensor sent: {len(self.edges)}"
                )
            for edge, device, gradient in zip(self.edges, self.devices, payload.tensors, strict=True):
                if edge is not None and gradient is not None:
                    roots.append(edge)
                    # Autograd wants it where the output is; it may come from a stage that computes elsewhere.
                    gradients.append(gradient if gradient.device == device else gradient.to(device))
        return roots, gradients
