"""The same models as a launch by torchrun: each stage is a process of its own, and ties go by name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from models.catalogue import CONFIGURATIONS, STAGES, runs
from models.training import TOLERANCE
from under_torchrun import reports

# Each rank imports libraries of models, which takes seconds on a quiet machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(620)]


def check(stages: int, models: Sequence[str], configurations: Sequence[str]) -> None:
    """Launch ``stages`` ranks; every one of them is within the tolerance in every run."""
    arguments = ",".join(models), ",".join(configurations)
    for report in reports("models/torchrun_models.py", *arguments, ranks=stages, timeout_s=600):
        worst = report["worst"]
        assert len(worst) == sum(model in models and chosen in configurations for model, chosen in runs())
        assert {run: error for run, error in worst.items() if not error < TOLERANCE} == {}


@pytest.mark.long
def test_processes_train_a_tied_model_as_one_does() -> None:
    check(2, ["bert", "qwen2"], ["bfw-deferred-deterministic", "default"])


@pytest.mark.long
@pytest.mark.parametrize("stages", sorted(set(STAGES.values())))
def test_processes_train_every_model_in_every_configuration_as_one_does(stages: int) -> None:
    models = [name for name, count in STAGES.items() if count == stages]
    check(stages, models, list(CONFIGURATIONS))


@pytest.mark.long
def test_a_contrastive_loss_over_ranks_of_data_is_that_of_one_process_with_all_features() -> None:
    """CLIP's, over a dim in ``reduce``; each rank has weights, and with the default hint sizes, of its own."""
    for report in reports("models/torchrun_contrastive.py", ",".join(CONFIGURATIONS), ranks=4, timeout_s=600):
        assert report["worst"].keys() == CONFIGURATIONS.keys()
        assert {run: error for run, error in report["worst"].items() if not error < TOLERANCE} == {}
