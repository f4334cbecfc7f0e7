"""Loading: the newest checkpoint, or a chosen one, into the modules, optimizer and pipeline of every rank."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rrfp.checkpoint.files import METADATA, Contents
from rrfp.checkpoint.folder import latest, note_newest, older
from rrfp.checkpoint.names import (
    Modules,
    Optimizers,
    grouped,
    load_model,
    model_entries,
    names_of,
    optimizers_of,
    parameter_names,
)
from rrfp.checkpoint.plain import NotPlainError
from rrfp.checkpoint.rank_state import Pipe, Place, entry_for, lost_of, replicas_of, saved_places, unpack
from rrfp.checkpoint.ranks import Ranks, failures
from rrfp.errors import ConfigError, RrfpError
from rrfp.log import get_logger
from rrfp.plain import path_of

logger = get_logger(__name__)

_MODEL, _STATE, _GROUPS, _REPLICAS = "model.", "optimizer.state.", "optimizer.param_groups.", "replicas."

#: The entries of a checkpoint.
Saved = Mapping[str, TensorStorageMetadata | BytesStorageMetadata]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load` has loaded.

    Attributes:
        step: training steps completed.
        extra: this rank's ``extra`` of the save; on another layout that of the first with its data.
        path: the checkpoint's own folder.
    """

    step: int
    extra: Any
    path: Path


def load(
    folder: str | os.PathLike[str],
    modules: Modules,
    optimizer: Optimizers = None,
    *,
    pipe: Pipe | None = None,
    path: str | os.PathLike[str] | None = None,
    trust_pickles: bool = False,
) -> Loaded | None:
    """Load the newest complete checkpoint on every rank, on any layout of stages, chunks and replicas.

    Parameters, buffers and optimizer state are found by their names in the whole model. Torch's generators of a rank go
    on where they were, if the layout is the same; buffers that differ between data-parallel ranks, such as running
    statistics, if their number is the same, and otherwise from those of the first. Without ``trust_pickles`` nothing in
    the files is executed.

    Args:
        folder: of the checkpoints of the run.
        modules: as in `save`; loaded in place.
        optimizer: as in `save`; None loads the model only.
        pipe: gets the pipeline's state: see `rrfp.Pipeline.load_state_dict`. Best before it is entered.
        path: the folder of one checkpoint, such as an older one, instead of the newest: also one that
            ``torch.distributed.checkpoint`` wrote from ``{"model": ..., "optimizer": ...}``.
        trust_pickles: load objects of any class, too, which an older version of RRFP, or another program, has saved.
            That runs whatever code the files name: only for what you trust, like torch's ``weights_only=False``.

    Returns:
        The step and this rank's ``extra``; None if there is no complete checkpoint.

    Raises:
        ConfigError: on all ranks, if the checkpoint lacks a name or has another shape for it, the optimizer is of
            another class, the pipeline refuses its state, or ``folder`` or ``path`` is no path.
        RrfpError: if a file is damaged, holds what is no plain data, or cannot be read; names the file, the rank, the
            reason and the checkpoint before.
    """
    ranks = Ranks.of(pipe)
    with ranks.together(f"the checkpoints in {folder!r} cannot be read"):
        note_newest(path_of("folder", folder))
        given = None if path is None else path_of("path", path)
    chosen = latest(folder) if given is None else given
    if chosen is None:
        return None
    text = f"checkpoint {chosen} cannot be read"
    with _unreadable(chosen), ranks.together(text):
        contents = open_checkpoint(chosen, trust_pickles=trust_pickles, rank=ranks.rank)
        saved: Saved = contents.metadata.state_dict_metadata
        position = Place.of(None if pipe is None else pipe.state_dict(), ranks.number)
    places, saved_by = [Place(*each) for each in ranks.gather(position)], saved_places(saved)
    replica = position.replica if replicas_of(places) == replicas_of(saved_by) else None
    with ranks.together(text):
        entries = _wanted(saved, modules, optimizer, replica)
        name, is_same_place = entry_for(position, saved_by, len(places) - lost_of(saved))
        if name is not None:
            entries[name] = _room(saved[name])
    if replica is None and ranks.rank == 0:
        _tell_of_replicas(saved, replicas_of(saved_by), replicas_of(places))
    # Each file once, by one of the ranks.
    asked = ranks.gather((sorted(contents.files(entries)), sorted(entries)))
    files = sorted(set[str]().union(*(names for names, _ in asked)))
    if ranks.rank == 0:
        _tell_of_unread(saved, {_model_name(key) for _, keys in asked for key in keys})
    with _unreadable(chosen), ranks.together(text):
        contents.check(files[ranks.rank :: len(places)])
    with _unreadable(chosen), failures(text, ranks):
        dcp.load(
            entries,
            storage_reader=contents.reader(),
            planner=contents.planner(),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    extra = None
    with _unreadable(chosen), ranks.together(text):
        if name is not None:
            try:
                extra = unpack(entries[name], restore=is_same_place, trust_pickles=trust_pickles)
            except NotPlainError as error:
                raise NotPlainError(f"{', '.join(contents.files([name]))} {error}") from error
    with ranks.together(f"checkpoint {chosen} cannot be loaded"):
        _apply(entries, modules, optimizer, pipe, replica)
    return Loaded(entries.get("step", 0), extra, chosen)


@contextmanager
def _unreadable(chosen: Path) -> Iterator[None]:
    """Add to an error that a checkpoint cannot be read which one can be, perhaps."""
    try:
        yield
    except ConfigError:
        raise
    except RrfpError as error:
        if (before := older(chosen)) is None:
            raise
        raise RrfpError(f"{error}; pass path={str(before)!r}, or delete this one, to go on from there") from error


def open_checkpoint(path: Path, *, trust_pickles: bool, rank: int) -> Contents:
    if not (path / METADATA).is_file():
        raise ConfigError(f"path is {str(path)!r}, must be the folder of a complete checkpoint: it has no {METADATA}")
    contents = Contents.of(path, trust_pickles=trust_pickles)
    if contents.sums is None and rank == 0:
        logger.warning("checkpoint %s was written without digests: damage to its files may not be noticed", path)
    return contents


def _wanted(saved: Saved, modules: Modules, optimizer: Optimizers, replica: int | None) -> dict[str, Any]:
    """The entries that this rank loads, with memory for their tensors; ``replica``'s own where it has some."""
    entries: dict[str, Any] = {}
    for name, value in model_entries(modules).items():
        key = f"{_MODEL}{name}"
        if (own := f"{_REPLICAS}{replica}.{key}") in saved:
            key = own
        if key not in saved:
            raise ConfigError(f"the checkpoint lacks {name!r}, must have every name of modules: {_near(key, saved)}")
        shape = getattr(saved[key], "size", None)
        if isinstance(value, Tensor) and shape != value.shape:
            theirs = "no tensor" if shape is None else f"of shape {tuple(shape)}"
            raise ConfigError(f"{name!r} is {theirs} in the checkpoint, must be of shape {tuple(value.shape)}")
        # In place: the caller's own tensors.
        entries[key] = value
    names = parameter_names(modules)
    by_parameter = _by_parameter(saved)
    for each in optimizers_of(optimizer):
        for _, parameter in grouped(each):
            name = names_of(parameter, names)[0]
            if name not in by_parameter:
                raise ConfigError(f"the checkpoint has no optimizer state by name for {name!r}: pass optimizer=None")
            _check_class(each, by_parameter[name])
            entries |= {key: _room(saved[key], parameter) for key in by_parameter[name]}
    entries |= {key: None for key in saved if key == "step" or key.startswith("pipeline.")}
    return entries


def _tell_of_replicas(saved: Saved, theirs: int, ours: int) -> None:
    names = sorted({_model_name(key) for key in saved if key.startswith(_REPLICAS)})
    if names:
        text = (
            "%d buffer(s) differ between the %d data-parallel ranks of the checkpoint; the %d of this run take those "
            "of rank 0: %s"
        )
        logger.warning(text, len(names), theirs, ours, ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""))


def _tell_of_unread(saved: Saved, read: set[str]) -> None:
    names = sorted({_model_name(key) for key in saved if key.startswith(_MODEL)} - read)
    if names:
        text = "%d parameter(s) or buffer(s) of the checkpoint are in no rank's modules, and are left out: %s"
        logger.warning(text, len(names), ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""))


def _model_name(key: str) -> str:
    """Of a parameter or buffer, in the model; "" for another entry."""
    own = key.split(".", 2)[2] if key.startswith(_REPLICAS) else key
    return own.removeprefix(_MODEL) if own.startswith(_MODEL) else ""


def _check_class(optimizer: Optimizer, keys: list[str]) -> None:
    """Refuse the state of another class, which has other hyperparameters: its `step` would fail, or forget.

    Classes of another version of torch may have some more, or some less.
    """
    saved = {key.rpartition(".")[2] for key in keys if key.startswith(_GROUPS)}
    lacking = sorted(set(optimizer.defaults) - saved)
    own = {*optimizer.defaults, *(field for group in optimizer.param_groups for field in group)}
    # Learning rate schedulers add some.
    unknown = sorted(field for field in saved - own if not field.endswith(("_lr", "_momentum")))
    if lacking and unknown:
        raise ConfigError(
            f"optimizer is {type(optimizer).__name__}, must be of the class that was saved, or None: the checkpoint's "
            f"has {', '.join(unknown)}, and lacks {', '.join(lacking)}"
        )


def _by_parameter(saved: Saved) -> dict[str, list[str]]:
    """The entries of optimizers by the name of the parameter, which may have dots; the last part is the field."""
    keys: dict[str, list[str]] = {}
    for key in saved:
        for kind in (_STATE, _GROUPS):
            if key.startswith(kind):
                keys.setdefault(key.removeprefix(kind).rpartition(".")[0], []).append(key)
    return keys


def _room(saved: TensorStorageMetadata | BytesStorageMetadata, like: Tensor | None = None) -> Any:
    """A tensor to load into, sharded as ``like`` if it has its shape; None for what is no tensor."""
    if isinstance(saved, BytesStorageMetadata):
        return None
    dtype = saved.properties.dtype
    if isinstance(like, DTensor) and saved.size == like.shape:
        return torch.zeros_like(like, dtype=dtype)
    return torch.empty(saved.size, dtype=dtype)


def _apply(
    entries: Mapping[str, Any], modules: Modules, optimizer: Optimizers, pipe: Pipe | None, replica: int | None
) -> None:
    prefix = f"{_REPLICAS}{replica}."
    by_name = {key.removeprefix(prefix): value for key, value in entries.items()}
    model = {name.removeprefix(_MODEL): value for name, value in by_name.items() if name.startswith(_MODEL)}
    load_model(modules, model)
    names, by_parameter = parameter_names(modules), _by_parameter(entries)
    for each in optimizers_of(optimizer):
        state = each.state_dict()
        state["state"] = {}
        groups = [group for group in state["param_groups"] for _ in group["params"]]
        for index, (_, parameter) in enumerate(grouped(each)):
            keys = by_parameter[names_of(parameter, names)[0]]
            if own := {key.rpartition(".")[2]: entries[key] for key in keys if key.startswith(_STATE)}:
                state["state"][index] = own
            groups[index].update({key.rpartition(".")[2]: entries[key] for key in keys if key.startswith(_GROUPS)})
        each.load_state_dict(state)
    if pipe is not None:
        _load_pipe(entries, pipe)


def _load_pipe(entries: Mapping[str, Any], pipe: Pipe) -> None:
    own = {**pipe.state_dict(), "step": entries.get("step", 0), "measured": []}
    if "pipeline.state" in entries:
        own = json.loads(entries["pipeline.state"])
        own["measured"] = [json.loads(entries[key]) for key in entries if key.startswith("pipeline.measured.")]
    pipe.load_state_dict(own)


def _near(key: str, saved: Saved) -> str:
    names = sorted(each.removeprefix("model.") for each in saved if each.startswith("model."))
    return f"it has {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
