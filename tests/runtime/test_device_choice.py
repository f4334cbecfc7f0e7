"""Which device a rank computes on, and which choices are refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from runtime.host_device import HostDevice
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import rrfp
from rrfp.compute.lanes.thread import ThreadLane
from rrfp.errors import ConfigError
from rrfp.pipeline.device_choice import choose_device, generator_devices
from rrfp.pipeline.options import common_options


def on(*devices: str) -> nn.Module:
    """A module with a parameter on each of ``devices``; those of CUDA have no memory."""
    module = nn.Module()
    for index, device in enumerate(devices):
        with FakeTensorMode():
            module.register_parameter(f"w{index}", nn.Parameter(torch.empty(2, device=device)))
    return module


@pytest.fixture
def two_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that there are two, and that the second is current."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def chosen(option: Any, *modules: nn.Module) -> str | None:
    device = choose_device(dict(enumerate(modules)), option)
    return None if device is None else device.name


@pytest.mark.usefixtures("two_cuda_devices")
def test_the_modules_decide_and_the_cpu_goes_with_any() -> None:
    assert chosen(None) is None
    assert chosen(None, on("cpu", "cpu:0"), nn.Tanh()) is None
    assert chosen(None, on("cuda:0")) == "cuda:0"
    assert chosen(None, nn.Tanh(), on("cpu"), on("cpu", "cuda:1")) == "cuda:1"


@pytest.mark.usefixtures("two_cuda_devices")
@pytest.mark.parametrize("option", ["cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 1)])
def test_the_option_decides_for_modules_without_parameters_and_may_repeat_the_modules_choice(option: Any) -> None:
    assert chosen(option, nn.Tanh()) == chosen(option, on("cuda:1")) == "cuda:1"


@pytest.mark.usefixtures("two_cuda_devices")
@pytest.mark.parametrize("option", ["cpu", torch.device("cpu")])
def test_the_cpu_may_be_named(option: Any) -> None:
    assert chosen(option, on("cpu")) is None
    with pytest.raises(
        ConfigError, match=r"device is 'cpu', but parameter 'w0' of virtual stage 0 is on cuda:0; move it"
    ):
        chosen(option, on("cuda:0"))


@pytest.mark.usefixtures("two_cuda_devices")
def test_ranks_of_one_process_share_the_object_of_a_device() -> None:
    assert choose_device({0: on("cuda:1")}, None) is choose_device({1: nn.Tanh()}, "cuda")
    assert choose_device({0: on("cuda:1")}, None) is not choose_device({0: on("cuda:0")}, None)


@pytest.mark.usefixtures("two_cuda_devices")
@pytest.mark.parametrize(
    ("option", "modules", "message"),
    [
        (
            None,
            [on("cuda:0"), on("cuda:1")],
            "modules lie on several: parameter 'w0' of virtual stage 0 on cuda:0, param",
        ),
        (
            "cuda:0",
            [on("cuda:1")],
            "device is 'cuda:0', but parameter 'w0' of virtual stage 0 is on cuda:1; move it, or",
        ),
        ("cuda:2", [], "device is 'cuda:2', but torch finds 2 CUDA devices here"),
        (
            None,
            [nn.Tanh(), on("cpu", "meta")],
            "parameter 'w1' of virtual stage 1 is on meta, must be on one of: cpu, cuda",
        ),
        ("cpu", [on("meta")], "parameter 'w0' of virtual stage 0 is on meta, must be on one of: cpu, cuda"),
        (torch.device("meta"), [], "device is 'meta', must be one of: cpu, cuda"),
        (torch.device("mps"), [on("cpu")], "device is 'mps', must be one of: cpu, cuda"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(option: Any, modules: list[nn.Module], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        chosen(option, *modules)
    assert message in str(refused.value)


def test_without_cuda_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device is 'cuda', but torch finds 0 CUDA devices here"):
        chosen("cuda")


@pytest.mark.usefixtures("two_cuda_devices")
@pytest.mark.parametrize(("module", "lines"), [(on("cpu"), 1), (nn.Tanh(), 0), (on("cpu", "cuda:0"), 0)])
def test_parameters_that_are_all_on_the_cpu_are_not_passed_over_in_silence(
    module: nn.Module, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert chosen("cuda:0", module) == "cuda:0"
    assert [line.split(",")[0] for line in caplog.messages] == ["device is 'cuda:0'"] * lines


class Elsewhere(HostDevice):
    def holds(self, tensor: Tensor) -> bool:
        return False


def test_a_device_of_the_callers_own_holds_the_modules_or_they_are_on_the_cpu() -> None:
    device = Elsewhere()
    assert choose_device({0: on("cpu")}, device) is device
    with pytest.raises(ConfigError, match="device is 'host:0', but parameter 'w0' of virtual stage 0 is on cuda:1"):
        choose_device({0: on("cuda:1")}, device)
    assert choose_device({0: on("cuda:1")}, mine := HostDevice()) is mine


def test_a_lane_of_the_callers_own_computes_on_the_stages_device() -> None:
    device = HostDevice()
    with (
        pytest.raises(
            ConfigError, match=r"^lane\(0\) computes on the CPU, but the stage is on host:0: return a StreamLane"
        ),
        rrfp.local([nn.Linear(2, 2)], device=device, lane=lambda stage: ThreadLane()).blocking(),
    ):
        pass


@pytest.mark.parametrize("bad", ["gpu", "cuda:", "cuda:-1", "cuda:01", "cuda:1000", "mps", "meta", 0, True])
def test_a_value_that_is_no_device_names_the_allowed_ones(bad: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"device is .*, must be 'cpu', 'cuda', 'cuda:<index>', a torch\.device, a Device"
    ):
        rrfp.local([nn.Linear(2, 2)], device=bad)


def test_a_pipeline_refuses_modules_without_memory_those_of_the_loss_included() -> None:
    with pytest.raises(ConfigError, match="'weight' of virtual stage 1 is on the meta device, must have values"):
        rrfp.local([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), device="meta"))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return self.scale * (output - target).square().mean()

    with pytest.raises(ConfigError, match=r"'loss_fn\.scale' of virtual stage 1 is on the meta device"):
        rrfp.local([nn.Linear(2, 2), nn.Linear(2, 2)], loss_fn=Loss())


def test_ranks_may_have_different_devices_and_the_first_one_says_its_own(caplog: pytest.LogCaptureFixture) -> None:
    assert "device" not in common_options()
    caplog.set_level(logging.INFO)
    with rrfp.local([nn.Linear(2, 2)], device=HostDevice()).blocking():
        pass
    assert any("transport inproc, rank 0 on host:0; rrfp" in message for message in caplog.messages)


def test_tasks_draw_from_the_generators_of_cuda_devices_only() -> None:
    assert generator_devices(None) == generator_devices(HostDevice()) == ()


@pytest.mark.parametrize(
    ("lane", "message"),
    [
        (lambda stage: 3, r"lane made an object of type int, must make an rrfp Lane"),
        (lambda: ThreadLane(), r"lane must be a factory that is called with \(int\): .* takes 0 positional arguments"),
    ],
)
def test_what_is_no_lane_is_refused(lane: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message), rrfp.local([nn.Linear(2, 2)], lane=lane):
        pass
