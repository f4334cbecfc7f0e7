"""What can go wrong with a folder of checkpoints: each is one clear error, and older checkpoints stay loadable."""

from __future__ import annotations

import logging
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rrfp import checkpoint
from rrfp.errors import ConfigError, RrfpError

SIZE = 16


def trained(optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
    """A module and its optimizer after a step."""
    module = nn.Linear(SIZE, SIZE)
    own = optimizer(module.parameters(), **options)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    own.step()
    return module, own


@contextmanager
def full_disk(size: int = 4096) -> Iterator[None]:
    """No file may be longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def without_data(path: Path) -> None:
    (path / "__0_0.distcp").unlink()


def with_half_of_the_data(path: Path) -> None:
    data = path / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])


def with_empty_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes(b"")


@pytest.mark.parametrize("damage", [without_data, with_half_of_the_data, with_empty_metadata])
def test_a_damaged_checkpoint_is_named_and_the_one_before_can_be_loaded(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    module, optimizer = trained()
    first, second = (checkpoint.save(tmp_path, module, optimizer, step=step) for step in (1, 2))
    damage(second)
    with pytest.raises(RrfpError) as caught:
        checkpoint.load(tmp_path, module, optimizer)
    assert str(caught.value).startswith(f"checkpoint {second} cannot be read: rank 0: ")
    assert str(caught.value).endswith(f"; pass path={str(first)!r}, or delete this one, to go on from there")
    assert "\n" not in str(caught.value)
    loaded = checkpoint.load(tmp_path, module, optimizer, path=first)
    assert loaded is not None
    assert loaded.step == 1
    # What is saved from there on is the newest.
    assert checkpoint.save(tmp_path, module, optimizer, step=2) == tmp_path / "000003-step-2"


@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.async_save])
def test_a_full_disk_costs_the_checkpoint_alone(save: Callable[..., Any], keep: int | None, tmp_path: Path) -> None:
    module, optimizer = trained()
    first = checkpoint.save(tmp_path, module, optimizer, step=1, keep=keep)
    with full_disk(), pytest.raises(RrfpError) as caught:
        save(tmp_path, module, optimizer, step=2, keep=keep).result()
    assert str(caught.value).startswith(f"checkpoint {tmp_path}/000002-step-2 cannot be written: rank 0: ")
    assert "\n" not in str(caught.value)
    if save is checkpoint.async_save:
        with pytest.raises(RrfpError, match="000002-step-2 cannot be written"):  # as every call that comes next
            checkpoint.latest(tmp_path)
    assert list(tmp_path.iterdir()) == [first], "the half that was written takes room"
    assert checkpoint.latest(tmp_path) == first
    loaded = checkpoint.load(tmp_path, module, optimizer)
    assert loaded is not None
    assert loaded.step == 1
    last = checkpoint.save(tmp_path, module, optimizer, step=2, keep=keep)
    assert sorted(tmp_path.iterdir()) == ([first, last] if keep is None else [last])


def test_a_folder_into_which_another_job_saves_is_refused(tmp_path: Path) -> None:
    module, optimizer = trained()
    own = checkpoint.save(tmp_path, module, optimizer, step=4)
    others = shutil.copytree(own, tmp_path / "000002-step-6")
    text = "must be of this job alone: since its last checkpoint another one has saved 000002-step-6; end one of the"
    for save in (checkpoint.save, checkpoint.async_save):
        with pytest.raises(ConfigError, match=text):
            save(tmp_path, module, optimizer, step=8, keep=1)
    assert sorted(tmp_path.iterdir()) == [own, others]
    # A job that begins, or begins anew, takes all of them for its own.
    assert checkpoint.load(tmp_path, module, optimizer) is not None
    assert checkpoint.save(tmp_path, module, optimizer, step=8) == tmp_path / "000003-step-8"


def test_two_jobs_never_write_into_one_checkpoint(tmp_path: Path) -> None:
    """Both begin with an empty folder."""
    module, optimizer = trained()
    assert checkpoint.load(tmp_path, module, optimizer) is None
    (tmp_path / "000001-step-1").mkdir()
    with pytest.raises(ConfigError, match="another one has saved 000001-step-1"):
        checkpoint.save(tmp_path, module, optimizer, step=1)
    assert not list((tmp_path / "000001-step-1").iterdir())


SGD, ADAM = torch.optim.SGD, torch.optim.AdamW


@pytest.mark.parametrize(
    ("saved", "loads", "text"),
    [
        (SGD, ADAM, "optimizer is AdamW, must be of the class that was saved, or None: the checkpoint's has dampening"),
        (ADAM, SGD, "optimizer is SGD, must be of the class that was saved, or None: the checkpoint's has amsgrad"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(saved: Any, loads: Any, text: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, *trained(saved, lr=0.1), step=1)
    module, optimizer = trained(loads, lr=0.1)
    with pytest.raises(ConfigError, match=text):
        checkpoint.load(tmp_path, module, optimizer)
    assert checkpoint.load(tmp_path, module) is not None


def test_the_hyperparameters_of_a_scheduler_and_of_another_torch_are_no_other_optimizer(tmp_path: Path) -> None:
    module, optimizer = trained()
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    checkpoint.save(tmp_path, module, optimizer, step=1)
    later = trained()
    assert checkpoint.load(tmp_path, *later) is not None
    assert later[1].param_groups[0]["initial_lr"] == optimizer.param_groups[0]["initial_lr"]
    module, optimizer = trained()
    del optimizer.param_groups[0]["decoupled_weight_decay"]
    checkpoint.save(tmp_path, module, optimizer, step=2)
    assert checkpoint.load(tmp_path, *trained()) is not None


def test_extra_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(RrfpError, match=r"checkpoint in .* cannot be written: rank 0: \w+: .*<lambda>"):
        checkpoint.save(tmp_path / "run", nn.Linear(1, 1), step=1, extra=lambda: None)
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_deleted_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stubborn = tmp_path / "000001-step-1"
    (stubborn / ".metadata").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, logger="rrfp"):
        path = checkpoint.save(tmp_path, nn.Linear(1, 1), step=2, keep=1)
    assert f"checkpoint {stubborn} is not wanted any more, and cannot be deleted" in caplog.text
    assert checkpoint.latest(tmp_path) == path
