"""The state that a forward saves for its backward: received inputs, and where backward enters the autograd graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rrfp.compute.engine import Root
from rrfp.compute.payload import ABSENT, Payload
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
        picked: by successor, the indices of the sent tensors that it reads; None: all of them.
    """

    received: Received
    outputs: tuple[_Output | None, ...] = ()
    loss: Tensor | None = None
    loss_weight: float = 0.0
    unweighted: tuple[Tensor, ...] = ()
    picked: tuple[tuple[int, ...] | None, ...] = ()

    @classmethod
    def of_outputs(cls, received: Received, output: Payload, read: Sequence[tuple[str, ...] | None]) -> SavedForward:
        """For a virtual stage that sends ``output``, of which each successor reads the keys ``read``, None for all."""
        # Why not keep the tensors? An edge refers to the graph alone, so an output is freed once it is sent, unless
        # autograd itself saved it.
        saved = [
            _Output(get_gradient_edge(t), t.shape, t.dtype, t.device) if t is not None and t.requires_grad else None
            for t in output.tensors
        ]
        picked = tuple([None if keys is None else output.pick(keys)[1] for keys in read])
        return cls(received, tuple(saved), picked=picked)

    def roots(self, grads: Sequence[Payload]) -> tuple[list[Root], list[Tensor]]:
        """Where backward enters the graph, and the gradient for each entry; a root may occur several times.

        Several gradients of one output are those of the later readers first. Autograd adds them in this order, as it
        does where one process calls the readers in the order of virtual stages.

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
        for payload, indices in zip(reversed(grads), reversed(self.picked), strict=True):
            if payload is ABSENT:
                continue
            sent = self.outputs if indices is None else [self.outputs[i] for i in indices]
            if len(payload.tensors) != len(sent):
                raise StageError(
                    f"{len(payload.tensors)} gradients arrived, must be one for each tensor sent: {len(sent)}"
                )
            for output, gradient in zip(sent, payload.tensors, strict=True):
                if output is not None and gradient is not None:
                    roots.append(output.edge)
                    gradients.append(output.gradient(gradient))
        return roots, gradients
