"""Saving: at once, or beside the training."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.tensor import DTensor

from rrfp.checkpoint import plain
from rrfp.checkpoint.files import SUMS_ENTRY, EntriesPlanner, Writer
from rrfp.checkpoint.folder import discard, new_path, note_newest, prune
from rrfp.checkpoint.names import Modules, Optimizers, collision, model_entries, optimizer_entries, state_names
from rrfp.checkpoint.rank_state import Pipe, Place, lost_entry, pack, replicas_of
from rrfp.checkpoint.ranks import Ranks, failures, under_way
from rrfp.errors import ConfigError, misspelt
from rrfp.plain import or_none, path_of, whole


class SaveArguments(TypedDict, total=False):
    """The keyword arguments of `save` and `async_save`."""

    pipe: Pipe | None
    """The pipeline, entered or not; its state, with the step, is part of the checkpoint."""

    step: int | None
    """Without a pipeline: training steps completed."""

    extra: Any
    """What this rank needs besides: the state of its sampler, data loader, scheduler, in tensors and plain data. Ranks
    that read the same data pass the same; on another layout a rank gets that of the first with its data."""

    keep: int | None
    """How many complete checkpoints stay in the folder; None for all. Older ones are deleted when this is complete."""


class Saving:
    """A checkpoint on its way; made by `async_save`.

    Attributes:
        path: the checkpoint's own folder.
    """

    def __init__(self, path: Path, written: Future[Any]) -> None:
        self.path = path
        self._written = written

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete.

        Args:
            timeout: seconds; None: any.

        Returns:
            The checkpoint's own folder.

        Raises:
            TimeoutError: if it is not complete by then.
            RrfpError: if a rank cannot write its part; names the rank and the reason.
        """
        self._written.result(timeout)
        return self.path

    @property
    def is_complete(self) -> bool:
        """Whether it was written; never waits."""
        return self._written.done() and self._written.exception() is None


def save(
    folder: str | os.PathLike[str],
    modules: Modules,
    optimizer: Optimizers = None,
    **arguments: Unpack[SaveArguments],
) -> Path:
    """Write a checkpoint of the whole run, with all ranks, between two steps.

    Args:
        folder: of all checkpoints of the run, on a file system that all ranks see; this one gets a folder in it.
        modules: of this rank: a module, a list, a stage of `rrfp.split`, or a dict
            ``{name in the whole model: module}``; with a graph the same ``{part: module}`` that the pipeline got, where
            the modules of one part must have different names of their own.
        optimizer: of this rank, or a list; its state is saved by parameter name.
        arguments: ``pipe``, ``step``, ``extra``, ``keep``: see `SaveArguments`.

    Returns:
        The checkpoint's own folder; it is complete.

    Raises:
        ConfigError: on all ranks, if an argument does not fit, ``extra`` or the optimizer's state has something that
            only running code could load, two stages, or two ranks of a group, have one name for different values, or
            another job saves into the folder.
        RrfpError: if a rank cannot write its part, also in an asynchronous save before; names the rank and the reason.

    With ``pipe`` it goes also after a step that was finished without a lost rank, on those that are left.
    """
    # Written here, and not in a thread, so that Ctrl-C ends it.
    entries, path, ranks, keep = _prepare(folder, modules, optimizer, arguments)
    with _writing(path, ranks):
        dcp.save(
            entries,
            storage_writer=Writer(path),
            planner=EntriesPlanner(),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    if ranks.rank == 0:
        prune(path.parent, keep)
    return path


def async_save(
    folder: str | os.PathLike[str],
    modules: Modules,
    optimizer: Optimizers = None,
    **arguments: Unpack[SaveArguments],
) -> Saving:
    """As `save`, but return once everything is copied to the CPU; a thread writes it while the training goes on.

    A save that is still under way is awaited first. Call ``result()`` of the last one before the program ends.

    Args:
        folder: as in `save`.
        modules: as in `save`.
        optimizer: as in `save`.
        arguments: as in `save`.

    Returns:
        The checkpoint on its way.

    Raises:
        ConfigError: as `save`.
        RrfpError: if the save before failed.
    """
    entries, path, ranks, keep = _prepare(folder, modules, optimizer, arguments)
    written: Future[Any] = dcp.async_save(  # type: ignore[assignment]  # with this stager, a plain future
        entries,
        storage_writer=Writer(path),
        planner=EntriesPlanner(),
        process_group=ranks.group,
        no_dist=ranks.group is None,
    )
    complete: Future[None] = Future()

    def finish(written: Future[Any]) -> None:
        try:
            with _writing(path, ranks):
                written.result()
            if ranks.rank == 0:
                prune(path.parent, keep)
            complete.set_result(None)
        except BaseException as error:
            complete.set_exception(error)

    written.add_done_callback(finish)
    under_way.append(complete)
    return Saving(path, complete)


def _prepare(
    folder: str | os.PathLike[str], modules: Modules, optimizer: Optimizers, arguments: SaveArguments
) -> tuple[dict[str, Any], Path, Ranks, int | None]:
    """What this rank writes, where, with whom, and how many checkpoints stay."""
    ranks, keep = Ranks.of(arguments.get("pipe")), arguments.get("keep")
    with ranks.together(f"checkpoint in {folder} cannot be written"):
        where = path_of("folder", folder)
        keep = or_none(whole, "keep", keep, 1)
        _check_known(arguments)
        entries, position = _entries(modules, optimizer, arguments, ranks)
    names = sorted(name for name in entries if name.startswith("model."))
    gathered = ranks.gather((position, str(entries["step"]), names))
    places = [Place(*place) for place, _, _ in gathered]
    _check_steps([step for _, step, _ in gathered], ranks)
    _check_names(entries, places, [names for _, _, names in gathered], ranks)
    _check_group(entries, places, ranks)
    if replicas_of(places) > 1:
        _tell_replicas_apart(entries, {f"model.{name}" for name in state_names(modules)}, places, ranks)
    path = None
    with ranks.together(f"checkpoint in {folder} cannot be written"):
        if ranks.rank == 0:
            if ranks.number:  # rank 0, which wrote the earlier ones, was lost
                note_newest(where)
            path = str(new_path(where, entries["step"]))
    return entries, Path(ranks.from_first(path)), ranks, keep


@contextmanager
def _writing(path: Path, ranks: Ranks) -> Iterator[None]:
    """What fails is an `RrfpError`, and leaves nothing: on a full disk, there would be no room for the next one."""

    def failed() -> None:
        if ranks.rank == 0:
            discard(path)

    with failures(f"checkpoint {path} cannot be written", ranks, failed):
        yield


def _check_known(arguments: Mapping[str, Any]) -> None:
    known = SaveArguments.__annotations__
    for name in arguments:
        if name not in known:
            raise ConfigError(f"unknown argument {misspelt(name, known)}, must be one of: {', '.join(known)}")


def _entries(
    modules: Modules, optimizer: Optimizers, arguments: SaveArguments, ranks: Ranks
) -> tuple[dict[str, Any], Place]:
    pipe, step = arguments.get("pipe"), arguments.get("step")
    state = None if pipe is None else pipe.state_dict()
    if (state is None) == (step is None):
        raise ConfigError("step goes without pipe, whose state has it: must be exactly one of them")
    step = whole("step", step) if state is None else state["step"]
    position = Place.of(state, ranks.number)
    entries = {f"model.{name}": value for name, value in model_entries(modules).items()}
    entries |= {f"optimizer.{name}": value for name, value in optimizer_entries(modules, optimizer).items()}
    plain.check(arguments.get("extra"), "extra" if ranks.group is None else f"rank {ranks.number}'s extra")
    for name, value in entries.items():
        if not isinstance(value, Tensor):
            plain.check(value, name)
    entries["step"] = step
    entries[SUMS_ENTRY] = "sha256"
    if state is not None:
        for each in state.pop("measured"):
            entries[f"pipeline.measured.{each['virtual_stage']}"] = json.dumps(each)
        entries["pipeline.state"] = json.dumps(state)
    entries[position.entry] = pack(arguments.get("extra"))
    entries |= dict.fromkeys(map(lost_entry, ranks.lost))
    return entries, position


def _check_steps(steps: list[str], ranks: Ranks) -> None:
    if len(set(steps)) > 1:
        rank, other = next((rank, step) for rank, step in zip(ranks.numbers, steps, strict=True) if step != steps[0])
        raise ConfigError(
            f"step is {steps[0]} on rank {ranks.numbers[0]} and {other} on rank {rank}: must be the same on all"
        )


def _check_names(
    entries: Mapping[str, Any], places: Sequence[Place], names: Sequence[Sequence[str]], ranks: Ranks
) -> None:
    """Refuse a name that several stages have for different values; copies of a tied parameter are equal."""
    stages: dict[str, set[int]] = {}
    for place, own in zip(places, names, strict=True):
        for name in own:
            stages.setdefault(name, set()).add(place.stage)
    shared = sorted(name for name, on in stages.items() if len(on) > 1)
    if not shared:
        return
    digests = ranks.gather({name: _digest(entries[name]) for name in shared if name in entries})
    for name in shared:
        by_stage: dict[int, set[str]] = {}
        for place, each in zip(places, digests, strict=True):
            if name in each:
                by_stage.setdefault(place.stage, set()).add(each[name])
        if len({frozenset(own) for own in by_stage.values()}) > 1:
            first, second = sorted(by_stage)[:2]
            raise collision(name.removeprefix("model."), f"stages {first} and {second}")


def _check_group(entries: Mapping[str, Any], places: Sequence[Place], ranks: Ranks) -> None:
    """Refuse a name for which ranks of a group, which compute on the same data, have different plain tensors."""
    if len({(place.replica, place.stage) for place in places}) == len(places):
        return
    model = {name: value for name, value in entries.items() if name.startswith("model.")}
    digests = ranks.gather({name: _digest(value) for name, value in model.items() if not isinstance(value, DTensor)})
    first: dict[tuple[int, int, str], tuple[int, str]] = {}
    for place, own in zip(places, digests, strict=True):
        for name, digest in sorted(own.items()):
            other, known = first.setdefault((place.replica, place.stage, name), (place.rank, digest))
            if digest != known:
                raise ConfigError(
                    f"modules: {name.removeprefix('model.')!r} is another value on rank {place.rank} than on rank "
                    f"{other}, of the same stage and group: must be a DTensor where it is a shard, have a name of its "
                    "own on each rank, or be no part of the state (persistent=False); if these ranks have data of "
                    "their own, their mesh dim must be one of the pipeline's, with a name that begins with dp"
                )


def _tell_replicas_apart(entries: dict[str, Any], names: set[str], places: Sequence[Place], ranks: Ranks) -> None:
    """Give buffers that differ between data-parallel ranks, such as running statistics, an entry for each of them.

    Those of the first keep the model's names, for other layouts and for other programs.
    """
    replica = places[ranks.rank].replica
    own = {name: _digest(entries[name]) for name in names if not _spans_replicas(entries[name], places)}
    digests: dict[str, dict[int, set[str]]] = {}
    for place, theirs in zip(places, ranks.gather(own), strict=True):
        for name, digest in theirs.items():
            digests.setdefault(name, {}).setdefault(place.replica, set()).add(digest)
    for name in own:
        if len(set(map(frozenset, digests[name].values()))) > 1 and replica != min(digests[name]):
            entries[f"replicas.{replica}.{name}"] = entries.pop(name)


def _spans_replicas(value: Any, places: Sequence[Place]) -> bool:
    if not isinstance(value, DTensor):
        return False
    return replicas_of(places[rank] for rank in value.device_mesh.mesh.flatten().tolist()) > 1


def _digest(value: Any) -> str:
    """Of a tensor's bytes; a rank's shard counts for itself."""
    digest = hashlib.sha256()
    _add(value, digest)
    return digest.hexdigest()


def _add(value: Any, digest: hashlib._Hash) -> None:
    if isinstance(value, Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        # As bytes, because numpy does not know every dtype.
        raw = local.detach().cpu().contiguous().flatten().view(torch.uint8) if local.numel() else local
        digest.update(raw.numpy().data)
    elif isinstance(value, np.ndarray):
        digest.update(value.tobytes())
    elif isinstance(value, dict):
        for key, each in value.items():
            digest.update(repr(key).encode())
            _add(each, digest)
    elif isinstance(value, list | tuple):
        for each in value:
            _add(each, digest)
    else:
        digest.update(repr(value).encode())
