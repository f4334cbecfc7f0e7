"""A message whose tensors the receiver cannot make is reported, and not lost in the loop's log."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from transports.makers import MAKERS

from rrfp.errors import FrameError
from rrfp.testing.transport_checks import PairOptions
from rrfp.testing.transport_checks.pair import data, soon


@pytest.fixture
def torch_always_warns() -> Iterator[None]:
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.usefixtures("torch_always_warns")
@pytest.mark.parametrize("name", ["shm", "zmq-ipc"])
async def test_what_torch_refuses_at_the_receiver_is_an_error_of_receive(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        halves = torch.ones(8, dtype=torch.complex32)
        async with MAKERS[name](PairOptions()) as pair:
            warnings.simplefilter("error")  # as in a program that runs with -W error
            await pair.left.send(1, data(halves))
            with pytest.raises(FrameError, match=r"frames.*cannot become tensors: UserWarning: ComplexHalf"):
                await soon(pair.right.receive(), "the error is raised")
