"""Rules that compute the weight gradients of single operators later than autograd, and bitwise as autograd.

A rule keeps the tensors that the operator's own backward reads for its parameters (its input, never a copy) and repeats
autograd's formula. The attributes `_saved_*` of graph nodes are private to torch; they are probed once (`rules_work`),
and if the probe fails, nothing is deferred.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rrfp.compute.activations import unpack_measured
from rrfp.compute.split.autograd_graph import Node


class Saved(NamedTuple):
    """The values that a rule keeps of one node until W."""

    tensors: tuple[Tensor, ...]
    arguments: tuple[Any, ...] = ()


class Rule(ABC):
    """The weight gradients of one operator."""

    #: Positions of the operator's inputs that may lead to parameters.
    edges: tuple[int, ...]
    #: Private attributes of the node that hold tensors.
    saved: tuple[str, ...]

    def can_read(self, node: Node) -> bool:
        """Whether no other code's hook packed the node's saved tensors."""
        # Why not unpack them? Checkpointing recomputes in such a hook, and may be unpacked only once.
        return all(getattr(node, f"_raw{name}").unpack_hook in (None, unpack_measured) for name in self.saved)

    @abstractmethod
    def save(self, node: Node) -> Saved | None:
        """Read the values of the formula; None if the rule does not cover this."""

    @abstractmethod
    def gradient(self, saved: Saved, edge: int, grad: Tensor) -> Tensor:
        """The gradient along ``edge``, from the gradient ``grad`` of the output."""

    @abstractmethod
    def flops(self, node: Node) -> float:
        """Floating-point operations of the weight gradient, roughly."""


class _MatrixProduct(Rule):
    """``mm(input, weight.t())``: a linear layer without bias."""

    edges: tuple[int, ...] = (1,)
    saved: tuple[str, ...] = ("_saved_self",)

    def save(self, node: Node) -> Saved | None:
        (left,) = (getattr(node, name) for name in self.saved)
        strides, sizes = node._saved_mat2_sym_strides, node._saved_mat2_sym_sizes
        if not strides or left.is_complex():  # torch saves no strides for a frozen weight
            return None
        return Saved((left,), (strides[0] == 1 and strides[1] == sizes[0],))

    def gradient(self, saved: Saved, edge: int, grad: Tensor) -> Tensor:
        (left,), (by_column,) = saved.tensors, saved.arguments
        return grad.t().mm(left).t() if by_column else left.t().mm(grad)

    def flops(self, node: Node) -> float:
        rows, inner = getattr(node, f"{self.saved[0]}_sym_sizes")
        return 2.0 * float(rows * inner * node._saved_mat2_sym_sizes[1])


class _MatrixProductAndSum(_MatrixProduct):
    """``addmm(bias, input, weight.t())``: a linear layer with bias."""

    edges = (0, 2)
    saved = ("_saved_mat1",)

    def save(self, node: Node) -> Saved | None:
        if node._saved_alpha != 1 or node._saved_beta != 1:
            return None
        return super().save(node)

    def gradient(self, saved: Saved, edge: int, grad: Tensor) -> Tensor:
        # `_Entrances` sums it to the shape of the bias, as autograd does for every broadcast input.
        return grad if edge == 0 else super().gradient(saved, edge, grad)


class _Convolution(Rule):
    edges = (1, 2)
    saved = ("_saved_input", "_saved_weight")

    def save(self, node: Node) -> Saved | None:
        names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
        settings = [getattr(node, f"_saved_{name}") for name in names]
        return Saved((node._saved_input, node._saved_weight), (node._saved_bias_sym_sizes_opt, *settings))

    def gradient(self, saved: Saved, edge: int, grad: Tensor) -> Tensor:
        output_mask = [False, edge == 1, edge == 2]
        gradients = torch.ops.aten.convolution_backward(grad, *saved.tensors, *saved.arguments, output_mask)
        result: Tensor = gradients[edge]
        return result

    def flops(self, node: Node) -> float:
        weight, (rows, _, *sizes) = node._saved_weight, node._saved_input.shape
        return 2.0 * float(weight.numel() * rows * math.prod(sizes))


class _Embedding(Rule):
    """A table lookup: keeps indices, not a gradient as large as the table."""

    edges = (0,)
    saved = ("_saved_indices",)

    def save(self, node: Node) -> Saved | None:
        if node._saved_sparse:
            return None
        arguments = (
            node._saved_weight_sym_argsize_0,
            _signed(node._saved_padding_idx),
            node._saved_scale_grad_by_freq,
            node._saved_sparse,
        )
        return Saved((node._saved_indices,), arguments)

    def gradient(self, saved: Saved, edge: int, grad: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.embedding_backward(grad, *saved.tensors, *saved.arguments)
        return result

    def flops(self, node: Node) -> float:
        return float("inf")  # always deferred, to save memory and not time


def _signed(number: int) -> int:
    """torch returns -1 as an unsigned integer of 64 bits."""
    return number - (1 << 64) if number >> 63 else number


RULES: Mapping[str, Rule] = {
    "AddmmBackward0": _MatrixProductAndSum(),
    "MmBackward0": _MatrixProduct(),
    "ConvolutionBackward0": _Convolution(),
    "EmbeddingBackward0": _Embedding(),
}

#: Operators between a parameter and a rule's operator: with one input, and callable once more in W.
VIEWS_AND_CASTS = frozenset(
    {
        "TBackward0",
        "TransposeBackward0",
        "PermuteBackward0",
        "ViewBackward0",
        "UnsafeViewBackward0",
        "ToCopyBackward0",
    }
)


@lru_cache(maxsize=1)
def rules_work() -> bool:
    """Whether this torch has the private attributes of the rules."""
    # Why a thread? The probe fails under modes that the caller may have set: no_grad, autocast, a default device.
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(_probe()), name="rrfp-probe", daemon=True)
    thread.start()
    thread.join()
    return answers == [True]


def _probe() -> bool:
    weight = torch.ones(2, 2, requires_grad=True)
    node: Node = torch.nn.functional.linear(torch.ones(1, 2), weight, torch.ones(2)).grad_fn
    try:
        rule = RULES[node.name()]
        saved = rule.save(node) if rule.can_read(node) else None
        return saved is not None and torch.equal(
            rule.gradient(saved, rule.edges[-1], torch.ones(1, 2)).t(), torch.ones(2, 2)
        )
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return False
