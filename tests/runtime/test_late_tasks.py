"""A task that still runs when its pipeline has failed leaves the caller's random numbers alone."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
import torch
from torch import Tensor, nn

import rrfp


class Held(nn.Module):
    """Runs until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.started = threading.Event()
        self.release = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.started.set()
        assert self.release.wait(20)
        return x


@pytest.mark.allow_blocking(reason="the first pipeline of a process imports libraries")
@pytest.mark.parametrize("seeds", [True, False], ids=["the caller seeds", "the caller goes on"])
async def test_the_callers_generator_is_its_own_after_a_failure(seeds: bool) -> None:
    torch.manual_seed(123 if seeds else 7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    held = Held()
    with contextlib.suppress(rrfp.PipelineAborted):
        async with rrfp.local([held], loss_fn=lambda output, _: output.sum()) as pipe:
            step = asyncio.create_task(pipe.step([torch.zeros(1)], [None]))
            await asyncio.to_thread(held.started.wait, 20)
            step.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await step
    lanes = [thread for thread in threading.enumerate() if thread.name.startswith("rrfp-lane")]
    assert len(lanes) == 1
    if seeds:
        torch.manual_seed(123)
    held.release.set()
    await asyncio.to_thread(lanes[0].join, 20)
    assert torch.rand(3).tolist() == expected.tolist()
