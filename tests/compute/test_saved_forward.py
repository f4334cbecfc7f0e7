"""Where backward enters the graph, and with which gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rrfp.compute.payload import Payload
from rrfp.compute.read_only import Received
from rrfp.compute.torch_stage import SavedForward
from rrfp.errors import StageError


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_gradient_from_another_memory_is_moved_to_that_of_its_output(device: str) -> None:
    leaf = torch.ones(2, 3, device=device, requires_grad=True)
    gradient, unused = torch.ones(2, 3), torch.ones(1)
    saved = SavedForward.of_outputs(Received((), (), training=True), Payload((torch.ones(1), leaf * 2, None)), [None])
    roots, gradients = saved.roots([Payload((unused, gradient, None))])
    assert [each.device.type for each in gradients] == [device]
    assert (gradients[0] is gradient) is (device == "cpu"), "nothing is copied without need"
    torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
    assert leaf.grad is not None
    assert leaf.grad.device.type == device


@pytest.mark.parametrize(
    ("gradient", "what"),
    [(torch.ones(1, 3), r"shape \(1, 3\) and torch.float32"), (torch.ones(2, 3) * 1j, "torch.complex64")],
)
def test_a_gradient_that_does_not_fit_its_output_is_refused(gradient: Tensor, what: str) -> None:
    """autograd itself would expand it, or drop its imaginary part."""
    leaf = torch.ones(2, 3, requires_grad=True)
    saved = SavedForward.of_outputs(Received((), (), training=True), Payload((leaf * 2,)), [None])
    with pytest.raises(StageError, match=f"a gradient of .*{what} arrived for an output of shape \\(2, 3\\) and"):
        saved.roots([Payload((gradient,))])
