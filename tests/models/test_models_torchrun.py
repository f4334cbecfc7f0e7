"""The same models as a launch by torchrun: each stage is a process of its own, and ties go by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from models.catalogue import CONFIGURATIONS, STAGES
from models.training import TOLERANCE

TESTS = Path(__file__).parent.parent

# Each rank imports libraries of models, which takes seconds on a quiet machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(620)]


def check(stages: int, models: Sequence[str], configurations: Sequence[str]) -> None:
    """Launch ``stages`` ranks; every one of them is within the tolerance in every run."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(stages)]
    done = subprocess.run(
        [*command, str(TESTS / "models" / "torchrun_models.py"), ",".join(models), ",".join(configurations)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports = {report["rank"]: report["worst"] for report in map(json.loads, done.stdout.splitlines())}
    assert sorted(reports) == list(range(stages))
    for worst in reports.values():
        assert len(worst) == len(models) * len(configurations)
        assert {run: error for run, error in worst.items() if not error < TOLERANCE} == {}


def test_processes_train_tied_models_as_one_does() -> None:
    check(2, ["bert", "qwen2"], ["bfw-deferred-deterministic", "default"])


@pytest.mark.long
@pytest.mark.parametrize("stages", sorted(set(STAGES.values())))
def test_processes_train_every_model_in_every_configuration_as_one_does(stages: int) -> None:
    models = [name for name, count in STAGES.items() if count == stages]
    check(stages, models, list(CONFIGURATIONS))
