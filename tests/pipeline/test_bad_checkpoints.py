"""What can go wrong with a folder of checkpoints: each is one clear error, and older checkpoints stay loadable."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import fork_server
from torch import nn
from transports.children import NEW_MOUNTS, NEW_USERS, NOT_PERMITTED, in_child, unshare

from rrfp import checkpoint
from rrfp.checkpoint.ranks import Ranks
from rrfp.errors import ConfigError, RrfpError

__all__ = ["fork_server"]

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


def test_what_cannot_be_deleted_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stubborn = tmp_path / "000001-step-1"
    stubborn.write_text("mine")
    with caplog.at_level(logging.WARNING, logger="rrfp"):
        path = checkpoint.save(tmp_path, nn.Linear(1, 1), step=2, keep=1)
    assert f"checkpoint {stubborn} is not wanted any more, and cannot be deleted: it is no folder" in caplog.text
    assert stubborn.read_text() == "mine"
    assert checkpoint.latest(tmp_path) == path


def test_of_a_link_the_link_is_deleted_alone(tmp_path: Path) -> None:
    module, runs, empty = nn.Linear(1, 1), tmp_path / "runs", tmp_path / "empty"
    archived = checkpoint.save(tmp_path / "archive", module, step=500)
    whole = sorted(file.name for file in archived.iterdir())
    for folder in (runs, empty):
        folder.mkdir()
    (empty / "notes.txt").write_text("mine")
    (runs / "000001-step-500").symlink_to(archived)
    (runs / "000002-step-600").symlink_to(empty)  # not complete
    (runs / "000003-step-700").symlink_to(tmp_path / "gone")
    assert checkpoint.load(runs, module) is not None  # goes on from the archive
    first, second = (checkpoint.save(runs, module, step=step, keep=2) for step in (501, 502))
    assert sorted(runs.iterdir()) == [first, second]
    assert sorted(file.name for file in archived.iterdir()) == whole
    assert checkpoint.load(tmp_path / "archive", module) is not None
    assert (empty / "notes.txt").read_text() == "mine"


def test_a_link_as_the_folder_of_a_run_leads_to_its_checkpoints(tmp_path: Path) -> None:
    module, folder = nn.Linear(1, 1), tmp_path / "run"
    (tmp_path / "disk").mkdir()
    folder.symlink_to(tmp_path / "disk")
    for step in (1, 2, 3):
        last = checkpoint.save(folder, module, step=step, keep=1)
    assert list(folder.iterdir()) == [last]
    assert folder.is_symlink()


def test_what_a_kept_link_leads_to_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a user who goes back to an older one of the same run."""
    monkeypatch.chdir(tmp_path)
    module, folder = nn.Linear(1, 1), Path("runs")
    first, second = (checkpoint.save(folder, module, step=step) for step in (1, 2))
    link = folder / "000003-step-1"
    link.symlink_to(first.name)
    assert checkpoint.load(folder, module) is not None
    third = checkpoint.save(folder, module, step=2, keep=2)
    assert sorted(folder.iterdir()) == [first, link, third]
    assert not second.exists()
    assert checkpoint.load(folder, module, path=link) is not None
    # The link is not kept any more, and what it led to is not either.
    fourth = checkpoint.save(folder, module, step=3, keep=2)
    assert sorted(folder.iterdir()) == [third, fourth]


def save_beside_a_mount(archive: Path, folder: Path) -> object:
    user = os.geteuid()
    if not unshare(NEW_MOUNTS | (NEW_USERS if user else 0)):
        return NOT_PERMITTED
    if user:
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    ctypes.CDLL(None).mount(b"none", b"/", None, (1 << 14) | (1 << 18), None)  # private, recursively
    if subprocess.run(["mount", "--bind", archive, folder], capture_output=True, check=False).returncode:
        return NOT_PERMITTED
    checkpoint.save(folder.parent, nn.Linear(1, 1), step=2, keep=1)
    return None


def test_a_mount_point_among_the_checkpoints_keeps_its_contents(tmp_path: Path) -> None:
    """An archive that a container mounts there."""
    archive, folder = tmp_path / "archive", tmp_path / "runs" / "000001-step-1"
    for each in (archive, folder):
        each.mkdir(parents=True)
    (archive / ".metadata").touch()
    in_child(save_beside_a_mount, archive, folder)
    assert (archive / ".metadata").exists()


def test_what_a_kill_left_while_one_was_deleted_goes_with_the_next(tmp_path: Path) -> None:
    module = nn.Linear(1, 1)
    first = checkpoint.save(tmp_path, module, step=1)
    first.rename(tmp_path / "000001-step-1.deleted")
    (tmp_path / "notes.deleted").mkdir()
    last = checkpoint.save(tmp_path, module, step=2, keep=1)
    assert sorted(tmp_path.iterdir()) == [last, tmp_path / "notes.deleted"]


@pytest.mark.parametrize("given", ["runs\0a", 5], ids=["a NUL", "a number"])
def test_what_is_no_path_is_refused_by_its_name(given: Any, tmp_path: Path) -> None:
    module = nn.Linear(1, 1)
    for call in (
        lambda: checkpoint.load(given, module),
        lambda: checkpoint.latest(given),
        lambda: checkpoint.save(given, module, step=1),
    ):
        with pytest.raises(ConfigError, match=r"^folder is .*, must be a path$"):
            call()
    with pytest.raises(ConfigError, match=r"^path is .*, must be a path$"):
        checkpoint.load(tmp_path, module, path=given)


def test_a_folder_that_cannot_be_listed_is_an_error_that_names_it() -> None:
    name = "a" * 300
    for call in (lambda: checkpoint.load(name, nn.Linear(1, 1)), lambda: checkpoint.latest(name)):
        with pytest.raises(RrfpError, match=rf"^the checkpoints in '{name}' cannot be read: rank 0: OSError: "):
            call()


def test_ranks_exchange_plain_data_only() -> None:
    """A message of another rank, of which gloo does not know who sent it, is never unpickled."""
    value = {"text": ["a\udcff", 1, 2.5, None, True, b"\x00"]}
    assert Ranks().gather(value) == [value]
    with pytest.raises(TypeError):
        Ranks().gather(object())
