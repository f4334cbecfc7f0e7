"""Graphs on several ranks a stage: what one replica or no replica visits is summed as ever, and groups agree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import fork_server  # noqa: F401 - a fixture
from graphs.mesh_ranks import Job, MeshRanks, trains

from rrfp.model.mesh import Mesh

REPLICAS, GROUPS = Mesh((("pp", 2), ("dp", 2))), Mesh((("pp", 2), ("tp", 2)))
ALL, NONE = [True] * 4, [False] * 4
SOME: dict[str, Any] = {"vision": [True, True, False, False], "audio": [False, True, False, True]}
#: In both steps replica 0 alone visits the image encoder, and in the first nobody visits the audio encoder.
BY_REPLICA = [
    [{"vision": SOME["vision"], "audio": NONE}, {"vision": ALL, "audio": NONE}],
    [{"vision": NONE, "audio": NONE}, {"vision": NONE, "audio": SOME["audio"]}],
]


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def check(job: Job, folder: Path, **options: Any) -> None:
    values, expected = MeshRanks(folder, job, trains, **options).values(), job.expected()
    norm = math.sqrt(sum(float((grad**2).sum()) for grad in unrepeated(job, expected).values()))
    found: set[str] = set()
    for gradients, whole in values:
        for name, gradient in gradients.items():
            assert abs(gradient - expected[name]).max() <= 1e-12, name
        found |= gradients.keys()
        assert whole == pytest.approx(norm, abs=1e-12)
    assert found == expected.keys()
    assert all(sum(name in gradients for gradients, _ in values) == 2 for name in found)


def unrepeated(job: Job, gradients: dict[str, Any]) -> dict[str, Any]:
    """A tied parameter counts once in the norm."""
    repeats = {f"{name}.0.linear.weight" for name in list(job.own()[0].modules)[1:]} if job.is_tied else set()
    return {name: gradient for name, gradient in gradients.items() if name not in repeats}


@pytest.mark.parametrize("options", [{"hint": "bf"}, {"split": True, "deterministic": True}])
def test_a_part_that_one_replica_visits_has_the_sum_on_both(tmp_path: Path, options: dict[str, Any]) -> None:
    check(Job("colocated", REPLICAS, BY_REPLICA), tmp_path, **options)


def test_a_loss_that_one_replica_skips_counts_with_the_weights_of_both(tmp_path: Path) -> None:
    visits = [[{"tags": ALL, "order": [False, True, False, True]}], [{"tags": NONE, "order": ALL}]]
    check(Job("several_losses", Mesh((("pp", 3), ("dp", 2))), visits), tmp_path)


def test_a_tied_copy_whose_part_is_skipped_has_the_sum(tmp_path: Path) -> None:
    """First by both replicas, in the second step by one: the total of the first step counts once."""
    check(Job("colocated", REPLICAS, BY_REPLICA, is_tied=True), tmp_path, limit=1)


@pytest.mark.parametrize("coordination", ["leader", "agreement"])
def test_groups_agree_on_graphs_with_skips(tmp_path: Path, coordination: str) -> None:
    visits = [[SOME, {"vision": NONE, "audio": [True, False, False, False]}]]
    job = Job("colocated", GROUPS, visits)
    check(job, tmp_path, coordination=coordination, limit=1)
