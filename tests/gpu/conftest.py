"""The device of the tests marked gpu."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts: products with the same bits

from collections.abc import Iterator

import pytest
import torch
from gpu.stub.control import CudaStub

from benchmarks.gpu.target import Target, open_target
from rrfp.compute.split import backward as split_backward


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what states something of the stub, where the device is another."""
    if config.getoption("device") == "stub":
        return
    of_stub = [item for item in items if isinstance(item, pytest.Function) and "stub" in item.fixturenames]
    items[:] = [item for item in items if item not in of_stub]
    config.hook.pytest_deselected(items=of_stub)


@pytest.fixture
def stub(target: Target) -> Iterator[CudaStub]:
    """The stub of CUDA, working again after the test."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    stub = CudaStub()
    yield stub
    stub.heal()
    torch.cuda.synchronize()


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    with open_target(request.config.getoption("device")) as opened:
        yield opened
        assert opened.take_problems() == []


@pytest.fixture(autouse=True)
def defer_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing of a test's size would be deferred."""
    monkeypatch.setattr(split_backward, "MIN_FLOPS", 0.0)


@pytest.fixture
def same_bits() -> Iterator[None]:
    """Kernels that give the same bits each time."""
    cuda = torch.backends.cuda
    torch.use_deterministic_algorithms(True)
    for enable in (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_cudnn_sdp):
        enable(False)
    yield
    torch.use_deterministic_algorithms(False)
    for enable in (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_cudnn_sdp):
        enable(True)
