"""The folder of a run's checkpoints: ``<number>-step-<step>`` each, numbered in the order in which saves began.

A checkpoint is complete once it has its metadata, which is written last and at once. A save never writes into a folder
that was there before, so a killed one leaves the checkpoints before it as they were.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rrfp.checkpoint.ranks import Ranks
from rrfp.errors import ConfigError
from rrfp.log import get_logger
from rrfp.plain import path_of

logger = get_logger(__name__)

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
#: The end of the name of one that is being deleted.
_GONE = ".deleted"


class Checkpoint(NamedTuple):
    """One checkpoint, complete or not."""

    number: int
    step: int
    path: Path

    @property
    def is_complete(self) -> bool:
        return (self.path / ".metadata").is_file()


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint, the same on all ranks; every rank calls it.

    Args:
        folder: of the checkpoints; need not exist.

    Returns:
        The checkpoint's own folder; None if there is none.

    Raises:
        ConfigError: if there are several ranks and ``torch.distributed`` is not initialised, or ``folder`` is no path.
        RrfpError: if the save that was under way failed, or the folder cannot be read.
    """
    ranks = Ranks.of_process()
    with ranks.together(f"the checkpoints in {folder!r} cannot be read"):
        path = path_of("folder", folder)
        complete = [each.path for each in _checkpoints(path) if each.is_complete]
    # Rank 0's view: another rank may see the folder of a shared file system later.
    name: str | None = ranks.from_first(complete[-1].name if complete else None)
    return None if name is None else path / name


def new_path(folder: Path, step: int) -> Path:
    """Make the folder of a new checkpoint. On rank 0."""
    number, newest = _last(folder)
    if (number, newest) > _newest.get(folder.resolve(), (number, newest)):
        raise ConfigError(
            f"folder is {str(folder)!r}, must be of this job alone: since its last checkpoint another one has saved "
            f"{_name(number, newest)}; end one of the two"
        )
    path = folder / _name(number + 1, step)
    path.mkdir(parents=True)  # not there before, so that two jobs never write into one
    _newest[folder.resolve()] = number + 1, step
    return path


def note_newest(folder: Path) -> None:
    """Take all checkpoints in ``folder`` for those of this job."""
    _newest[folder.resolve()] = _last(folder)


def older(path: Path) -> Path | None:
    """The newest complete checkpoint before the one at ``path``."""
    before = [each for each in _checkpoints(path.parent) if each.is_complete and each.path.name < path.name]
    return before[-1].path if before else None


def discard(path: Path) -> None:
    """Delete a checkpoint, complete or not, of a link the link alone; a warning says if it cannot be. On rank 0."""
    try:
        if path.is_symlink():
            path.unlink()
            return
        if not path.is_dir():
            raise NotADirectoryError("it is no folder")
        gone = path
        if not path.name.endswith(_GONE):
            # First, and at once: a kill in the middle leaves nothing that looks complete. Also refuses a mount point.
            gone = path.rename(path.with_name(path.name + _GONE))
        shutil.rmtree(gone)
    except OSError as error:
        logger.warning("checkpoint %s is not wanted any more, and cannot be deleted: %s", path, error)


def prune(folder: Path, keep: int | None) -> None:
    """Delete all but the newest ``keep`` complete checkpoints, and what killed saves before them left. On rank 0."""
    if keep is None:
        return
    checkpoints = _checkpoints(folder)
    kept = [each for each in checkpoints if each.is_complete][-keep:]
    targets = {each.path.resolve() for each in kept}  # one may be a link to another
    for each in checkpoints:
        is_target = not each.path.is_symlink() and each.path.resolve() in targets
        if kept and each.number <= kept[-1].number and each not in kept and not is_target:
            discard(each.path)
    for path in sorted(folder.iterdir()):
        if path.name.endswith(_GONE) and _NAME.fullmatch(path.name.removesuffix(_GONE)):
            discard(path)


def _checkpoints(folder: Path) -> list[Checkpoint]:
    return sorted(_entries(folder))


def _entries(folder: Path) -> Iterator[Checkpoint]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            yield Checkpoint(int(match[1]), int(match[2]), path)


def _last(folder: Path) -> tuple[int, int]:
    """Number and step of the newest checkpoint, complete or not."""
    return max(((each.number, each.step) for each in _entries(folder)), default=(0, 0))


def _name(number: int, step: int) -> str:
    return f"{number:06d}-step-{step}"


#: The newest checkpoint that this process has made or found, by folder: number and step.
_newest: dict[Path, tuple[int, int]] = {}
