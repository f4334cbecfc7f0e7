"""What torch itself does not promise is found in its settings, and said once at the start."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from runtime.host_device import CudaLike
from torch import nn

import rrfp
from rrfp.compute.determinism import device_types, missing_on_cuda, not_promised
from rrfp.errors import ConfigError


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, and torch's other settings as they come; put back afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def test_one_thread_on_the_cpu_is_always_the_same() -> None:
    assert not_promised({"cpu", "meta"}) == []


def test_several_threads_on_the_cpu_round_by_their_number_and_add_indexed_gradients_in_any_order() -> None:
    torch.set_num_threads(3)
    rounding, indexing = not_promised({"cpu"})
    assert "another number of threads than 3" in rounding
    assert "gradient of indexing" in indexing
    torch.use_deterministic_algorithms(True)
    assert not_promised({"cpu"}) == [rounding]
    torch.use_deterministic_algorithms(True, warn_only=True)  # then they run all the same
    assert not_promised({"cpu"}) == [rounding, indexing]


def test_cuda_needs_three_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    kernels, convolutions, products = missing_on_cuda()
    assert kernels.startswith("torch.use_deterministic_algorithms(True), without warn_only")
    assert convolutions.startswith("torch.backends.cudnn.benchmark = False")
    assert products.startswith(
        "the environment variable CUBLAS_WORKSPACE_CONFIG, which is None, to be :4096:8 or :16:8"
    )
    torch.use_deterministic_algorithms(True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert missing_on_cuda() == [convolutions]
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert missing_on_cuda() == []
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert missing_on_cuda() == []
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":8:16")
    assert missing_on_cuda() == [products.replace("None", "':8:16'")]


def test_a_deterministic_pipeline_on_cuda_does_not_start_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [nn.Linear(2, 2)]
    with rrfp.local(modules, device=CudaLike()).blocking():
        pass
    with pytest.raises(
        ConfigError, match=r"deterministic=True on CUDA needs torch\.use_det.*, and the environment variable"
    ):
        rrfp.local(modules, device=CudaLike(), deterministic=True).blocking().__enter__()
    torch.use_deterministic_algorithms(True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with rrfp.local(modules, device=CudaLike(), deterministic=True).blocking():
        pass


def test_of_other_devices_nothing_is_known() -> None:
    assert not_promised({"xpu"}) == ["anything on devices of type xpu, of which nothing is known here"]


def test_devices_are_those_of_parameters_and_buffers() -> None:
    assert device_types([nn.Linear(2, 2, device="meta"), nn.BatchNorm1d(2)]) == {"meta", "cpu"}
    assert device_types([nn.Tanh()]) == {"cpu"}


@pytest.mark.parametrize(("threads", "deterministic", "lines"), [(2, True, 1), (1, True, 0), (2, False, 0)])
def test_a_deterministic_pipeline_says_it_once_when_it_starts(
    threads: int, deterministic: bool, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    pipeline = rrfp.local([nn.Linear(2, 2), nn.Linear(2, 2)], deterministic=deterministic).blocking()
    torch.set_num_threads(threads)  # what counts is what is in force when it starts
    with pipeline:
        pass
    assert len(caplog.messages) == lines
    assert all(
        line.startswith("deterministic=True orders tasks; torch itself does not promise: the same bits with")
        for line in caplog.messages
    )
