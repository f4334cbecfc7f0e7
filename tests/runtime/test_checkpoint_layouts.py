"""Checkpoints between real processes: saved on one layout, resumed on another with the same bits."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import fork_server as forked
import pytest
import torch
from batches import long
from fork_server import fork_server
from runtime.checkpoint_ranks import LAYERS, Run, adamw, layer, microbatches
from runtime.toys import TOLERANCE, loss_fn
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from rrfp import checkpoint
from rrfp.model.placement import Layout

__all__ = ["fork_server"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


@dataclass(frozen=True)
class Report:
    """What all ranks of a run say.

    Attributes:
        losses: of its steps.
        digests: of parameters and optimizer state, by layer.
        values: of parameters, by layer.
        first: the step with which it began.
        extra: of each rank.
        buffers: of each rank, by name.
        warnings: of all ranks while they loaded.
    """

    losses: list[float]
    digests: dict[str, str]
    values: dict[str, list[float]]
    first: int
    extra: list[Any]
    buffers: list[dict[str, Any]]
    warnings: list[str]


def train(run: Run, *, replicas: int = 1) -> Report:
    """A run on all of its ranks."""
    arguments = json.dumps(asdict(run))
    reports = forked.reports("runtime/checkpoint_ranks.py", arguments, ranks=run.stages * replicas, timeout_s=60)
    (losses,) = {tuple(report["losses"]) for report in reports}
    (first,) = {report["first"] for report in reports}
    digests: dict[str, str] = {}
    for report in reports:
        for name, digest in report["digests"].items():
            assert digests.setdefault(name, digest) == digest, "replicas differ"
    values = {name: each for report in reports for name, each in report["values"].items()}
    extra, buffers = [report["extra"] for report in reports], [report["buffers"] for report in reports]
    return Report(list(losses), digests, values, first, extra, buffers, [w for r in reports for w in r["warnings"]])


def test_four_virtual_stages_resume_looped_or_in_a_v_with_the_same_bits(tmp_path: Path) -> None:
    whole = train(Run(str(tmp_path / "none"), 2, 4))
    train(Run(str(tmp_path / "run"), 2, 2, save="save"))
    for layout in get_args(Layout):
        resumed = train(Run(str(tmp_path / "run"), 2, 4, layout))
        assert (resumed.first, resumed.extra) == (2, [0, 0])
        assert (resumed.losses, resumed.digests) == (whole.losses[2:], whole.digests)


def test_replicas_keep_their_own_running_statistics(tmp_path: Path) -> None:
    def run(stages: int, replicas: int, steps: int, folder: str = "saved", save: str = "only") -> Report:
        return train(Run(str(tmp_path / folder), stages, steps, norm=True, save=save), replicas=replicas)

    whole = run(1, 2, 4, "none")
    first, second = whole.buffers
    assert first["layers.0.1.running_mean"] != second["layers.0.1.running_mean"]
    saved = run(1, 2, 2, save="save")
    resumed = run(1, 2, 4)
    assert (resumed.first, resumed.losses, resumed.digests) == (2, whole.losses[2:], whole.digests)
    assert resumed.buffers == whole.buffers
    assert not resumed.warnings
    # What is the same on both is there once.
    newest = checkpoint.latest(tmp_path / "saved")
    assert newest is not None
    names = {name for name in FileSystemReader(newest).read_metadata().state_dict_metadata if "replicas" in name}
    assert names == {
        f"replicas.1.model.layers.{number}.1.{name}"
        for number in range(LAYERS)
        for name in ("running_mean", "running_var")
    }
    # Without another step: what another number of replicas begins with.
    fewer = run(2, 1, 2)
    assert {**fewer.buffers[0], **fewer.buffers[1]} == saved.buffers[0]
    (text,) = fewer.warnings
    assert text.startswith(
        "8 buffer(s) differ between the 2 data-parallel ranks of the checkpoint; the 1 of this run take those of rank 0"
    )
    assert text.endswith(" 0: layers.0.1.running_mean, layers.0.1.running_var, layers.1.1.running_mean, ...")


def test_two_stages_with_one_name_are_refused_on_all_ranks(tmp_path: Path) -> None:
    arguments = json.dumps(asdict(Run(str(tmp_path), 2, 1, save="collide")))
    for report in forked.reports("runtime/checkpoint_ranks.py", arguments, ranks=2, timeout_s=60):
        assert "stages 0 and 1 have the name '0.bias' for different values" in report["error"]
        assert "pass modules={'layers.4': block, ...}" in report["error"]
    assert not list(tmp_path.iterdir())


LAYOUTS: list[tuple[int, Layout]] = [(4, "looped"), (2, "looped"), (2, "v"), (1, "looped")]


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("saved", LAYOUTS)
def test_every_layout_resumes_every_other_with_the_same_bits(
    saved: tuple[int, Layout], replicas: int, tmp_path: Path
) -> None:
    stages, layout = saved
    whole = train(Run(str(tmp_path / "none"), stages, 4, layout), replicas=replicas)
    train(Run(str(tmp_path / "saved"), stages, 2, layout, save="save"), replicas=replicas)
    for stages, layout in LAYOUTS:
        resumed = train(Run(str(tmp_path / "saved"), stages, 4, layout), replicas=replicas)
        assert (resumed.first, sorted(set(resumed.extra))) == (2, list(range(replicas)))
        assert (resumed.losses, resumed.digests) == (whole.losses[2:], whole.digests)


#: Stages, virtual stages, layout and replicas.
Cut = tuple[int, int, Layout, int]

CUTS: list[Cut] = [
    (2, 2, "looped", 1),
    (2, 4, "v", 1),
    (1, 1, "looped", 2),
    (2, 4, "looped", 2),
]


@pytest.mark.parametrize("saved", [CUTS[0], *map(long, CUTS[1:])])
def test_another_cut_or_number_of_replicas_or_no_pipeline_agrees_to_rounding(saved: Cut, tmp_path: Path) -> None:
    """Without dropout, where replicas share one batch."""

    def run(folder: str, cut: Cut, steps: int, save: str = "only") -> Report:
        stages, virtual_stages, layout, replicas = cut
        own = Run(str(tmp_path / folder), stages, steps, layout, virtual_stages, 0.0, shared=True, save=save)
        return train(own, replicas=replicas)

    whole = run("none", saved, 4)
    run("saved", saved, 2, "save")
    for cut in [CUTS[2]] if saved == CUTS[0] else CUTS:
        resumed = run("saved", cut, 4)
        assert resumed.first == 2
        assert resumed.losses == pytest.approx(whole.losses[2:], rel=0, abs=TOLERANCE)
        for name, values in whole.values.items():
            assert resumed.values[name] == pytest.approx(values, rel=0, abs=TOLERANCE)
    assert without_a_pipeline(tmp_path / "saved", 4) == pytest.approx(whole.losses[2:], rel=0, abs=TOLERANCE)


def without_a_pipeline(folder: Path, steps: int) -> list[float]:
    """The losses of the steps that are left, in one process."""
    with torch.random.fork_rng(devices=[]):
        parts = {f"layers.{number}": layer(number, 0.0) for number in range(LAYERS)}
        model, optimizer, losses = nn.Sequential(*parts.values()), adamw(parts), []
        loaded = checkpoint.load(folder, parts, optimizer)
        assert loaded is not None
        for step in range(loaded.step, steps):
            inputs, targets = microbatches(step, 0, 1, shared=True)
            pairs = zip(inputs, targets, strict=True)
            loss = torch.stack([loss_fn(model(x), y) for x, y in pairs]).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses
