"""`rrfp doctor` where there is a GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from cli.shell import rrfp_process

from benchmarks.gpu.target import Target

pytestmark = pytest.mark.gpu


def test_doctor_names_each_gpu_and_its_versions(target: Target, record_property: Any) -> None:
    result = rrfp_process("doctor", "--json")
    answer = json.loads(result.stdout)
    checks, gpus = answer["checks"], answer["gpus"]
    for name, check in checks.items():
        record_property(name, check["detail"])
    assert (result.returncode, answer["ok"]) == (0, True)
    assert len(gpus["gpus"]) == torch.cuda.device_count()
    if target.is_cuda:
        assert 0 < gpus["gpus"][0]["free_bytes"] <= gpus["gpus"][0]["total_bytes"]
        assert all(gpus[name] for name in ("torch_cuda", "driver_cuda", "nccl"))
        assert checks["cuda:0"]["detail"].startswith(torch.cuda.get_device_name(0))
        assert checks["on cuda"]["detail"].startswith("StreamLane, depth 2; ")
