"""`rrfp doctor`: whether this machine is fit, its GPUs, and what is missing."""

from __future__ import annotations

import json
import os

import pytest
import torch
from cli.shell import rrfp, rrfp_process

from rrfp.commands import doctor
from rrfp.commands.doctor import Gpu, GpuReport, costly_settings, sharing_obstacle
from rrfp.devices.base import SharedMemory
from rrfp.lab.device_double import DoubleDevice, DoubleSharing


def test_doctor_finds_this_machine_fit() -> None:
    result = rrfp_process("doctor", "--json")
    answer = json.loads(result.stdout)
    assert (result.returncode, answer["ok"]) == (0, True)
    for name in ("python", "platform", "cores", "torch", "numpy", "pyzmq", "zmq", "auto", "torchrun"):
        assert answer["checks"][name]["ok"], answer["checks"][name]
        assert answer["checks"][name]["required"]
    for name in ("shm", "uvloop", "matplotlib", "cuda", "on cpu"):
        assert not answer["checks"][name]["required"]
    assert answer["checks"]["auto"]["detail"].startswith(
        f"inproc in one process; shm with processes of user {os.getuid()} on"
    )
    assert answer["checks"]["on cpu"]["detail"] == "ThreadLane, depth 1; transport auto, in rrfp.local inproc"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_doctor_without_a_gpu_gives_the_reason_in_one_line() -> None:
    lines = [line for line in rrfp("doctor").stdout.splitlines() if "cuda" in line.lower().split()[:2]]
    assert len(lines) == 1
    assert lines[0].startswith(f"-    cuda         no CUDA device: torch {torch.__version__} is built ")
    assert json.loads(rrfp("doctor", "--json").stdout)["gpus"]["gpus"] == []


def test_doctor_lists_gpus_with_their_peers_and_the_versions_of_what_drives_them() -> None:
    big = Gpu("Example", "9.0", 70 * 2**30, 80 * 2**30, peers=(1,))
    lonely = Gpu("Example", "8.0", 2**29, 2**30)
    report = GpuReport("2.11.0", "13.0", "580.1", "13.0", "2.28.9", "4,5", (big, lonely))
    assert report.lines() == {
        "cuda": "2 devices; torch is built for CUDA 13.0, driver 580.1 for CUDA up to 13.0, NCCL 2.28.9, "
        "CUDA_VISIBLE_DEVICES is '4,5'",
        "cuda:0": "Example, capability 9.0, 70.0 of 80.0 GiB free, peer access to 1",
        "cuda:1": "Example, capability 8.0, 0.5 of 1.0 GiB free, peer access to none",
    }


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (
            GpuReport("2.13.0+cpu", None, "580.1", "13.0", None, None),
            "no CUDA device: torch 2.13.0+cpu is built without CUDA (driver 580.1 for CUDA up to 13.0 found)",
        ),
        (
            GpuReport("2.13.0", "13.0", None, None, "2.29.7", None),
            "no CUDA device: torch 2.13.0 is built for CUDA 13.0, no driver found",
        ),
        (
            GpuReport("2.13.0", "13.0", None, "12.4", "2.29.7", ""),
            "no CUDA device: torch 2.13.0 is built for CUDA 13.0, driver of unknown version for CUDA up to 12.4 found, "
            "CUDA_VISIBLE_DEVICES is ''",
        ),
    ],
)
def test_doctor_says_why_torch_finds_no_gpu(report: GpuReport, line: str) -> None:
    assert report.missing() == line


def test_doctor_survives_a_look_at_gpus_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> GpuReport:
        raise RuntimeError("CUDA driver initialization\nfailed")

    monkeypatch.setattr(doctor, "gpu_report", fail)
    monkeypatch.setattr(doctor, "_LOOKS", {"python": (doctor._python, True)})
    result = rrfp("doctor")
    assert result.exit_code == 0
    assert "-    cuda         RuntimeError: CUDA driver initialization failed" in result.stdout
    assert json.loads(rrfp("doctor", "--json").stdout)["gpus"] is None


def test_doctor_fails_where_something_needed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LOOKS", {
        "python": (doctor._python, True),
        "torch": (doctor._package("no-such-package"), True),
        "extra": (doctor._package("no-such-extra"), False),
    })  # fmt: skip
    result = rrfp("doctor")
    assert result.exit_code == 1
    assert "FAIL torch        not installed: pip install no-such-package" in result.stdout
    assert "-    extra" in result.stdout


def test_the_doctor_tries_whether_a_device_can_share_its_memory() -> None:
    class Without(DoubleSharing):
        def allocate(self, num_bytes: int) -> SharedMemory:
            raise OSError("operation\nnot supported")

    with DoubleDevice() as device:
        assert sharing_obstacle(device) == ""
        device.sharing = Without()
        assert sharing_obstacle(device) == "its memory cannot be shared (OSError: operation not supported)"
        device.sharing = None  # type: ignore[assignment]
        assert sharing_obstacle(device) == "its memory cannot be shared between processes"


def test_the_doctor_warns_of_settings_that_cost() -> None:
    few = costly_settings({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert list(few) == ["connections"]
    assert "'1'" in few["connections"]
    assert few["connections"].endswith("unset it, or take 32")
    assert costly_settings({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}) == costly_settings({}) == {}
