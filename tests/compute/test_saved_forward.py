"""Where backward enters the graph, and with which gradients."""

from __future__ import annotations

import pytest
import torch

from rrfp.compute.payload import Payload
from rrfp.compute.received import Received
from rrfp.compute.saved_forward import SavedForward


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_gradient_from_another_memory_is_moved_to_that_of_its_output(device: str) -> None:
    leaf = torch.ones(2, 3, device=device, requires_grad=True)
    gradient, unused = torch.ones(2, 3), torch.ones(1)
    saved = SavedForward.of_outputs(Received((), (), training=True), (torch.ones(1), leaf * 2, None))
    roots, gradients = saved.roots([Payload((unused, gradient, None))])
    assert [each.device.type for each in gradients] == [device]
    assert (gradients[0] is gradient) is (device == "cpu"), "nothing is copied without need"
    torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
    assert leaf.grad is not None
    assert leaf.grad.device.type == device
