"""From stages, or from a checkpoint of them, to a folder of the Hub, which ``from_pretrained`` reads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.tensor import DTensor

from rrfp.checkpoint.files import METADATA, Contents
from rrfp.checkpoint.folder import latest
from rrfp.checkpoint.loading import open_checkpoint
from rrfp.checkpoint.ranks import Ranks, failures
from rrfp.errors import ConfigError
from rrfp.integrations.splitting.hub_folder import remove_weights, shard_name, write_index, write_shard
from rrfp.integrations.splitting.stages import Split, SplitStage
from rrfp.integrations.splitting.weights import Weights, entries_of
from rrfp.plain import path_of, shown

_SIZE = re.compile(r"([1-9]\d*) ?([KMGT]?B)")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

#: Entries that are written together, by their names in the model.
Group = tuple[str, ...]


def save_pretrained(
    folder: str | os.PathLike[str],
    modules: SplitStage | Split,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write the whole model as a folder of the Hub: safetensors with their index, and the configuration.

    Every rank calls it with its own stage, and writes the entries that no rank before it has; or one process calls it
    with all stages. No process holds more than its part and one file. Entries have the names and the form in which
    ``model.save_pretrained`` writes them, and tied ones are written once.

    Args:
        folder: made if it is not there. Weights that were there are replaced when all new ones are written.
        modules: the stage of this rank, or all stages, of `rrfp.split`.
        checkpoint: the folder of the checkpoints of a run, whose newest is taken, or of one checkpoint: values are
            read from there, into the dtypes of ``modules``, which may be on the meta device. Those of ``modules`` count
            if it is None.
        max_shard_size: of a file, in bytes, or such as ``"5GB"``; a larger tensor has a file of its own.

    Raises:
        ConfigError: on all ranks, if the ranks do not have all entries of the model, an entry has no value, is sharded,
            or is not in the checkpoint, or if ranks pass different paths.
        RrfpError: if the folder cannot be written or the checkpoint cannot be read; names the rank and the reason.
    """
    ranks = Ranks.of_process()
    text = f"folder {str(folder)!r} cannot be written"
    with ranks.together(text):
        where = path_of("folder", folder)
        source = None if checkpoint is None else path_of("checkpoint", checkpoint)
    _check_equal({"folder": where, "checkpoint": source}, ranks)
    chosen = None if source is None else _chosen(source, ranks)
    with ranks.together(text):
        limit, stages = _bytes_of(max_shard_size), _stages(modules)
        weights, chunks = stages[0].weights, [chunk for stage in stages for chunk in stage.chunks]
        entries = entries_of(chunks)
        own = {weights.tied(name)[0]: tensor for name, tensor in entries.items()}
        groups = weights.groups([name for name in weights.stored_names if name in own], chunks[0])
    owned = _owned(groups, weights.stored_names, ranks)
    with ranks.together(text):
        names = [name for group in owned for name in group]
        _check(names, own, weights, is_saved=chosen is not None)
        saved = None if chosen is None else _Saved(chosen, names, weights, own, ranks.rank)
        shards = _shards(owned, own, limit)
        where.mkdir(parents=True, exist_ok=True)
    counts = ranks.gather(len(shards))
    first = [0, *accumulate(counts)][ranks.rank]
    files = [shard_name(first + index, sum(counts)) for index in range(len(shards))]
    partial = [where / f".{file}.partial" for file in files]
    weight_map: dict[str, str] = {}
    size = 0
    try:
        with ranks.together(text):
            for shard, file, path in zip(shards, files, partial, strict=True):
                stored: dict[str, Tensor] = {}
                for group in shard:
                    values = {name: own[name].detach() for name in group} if saved is None else saved.read(group)
                    stored |= weights.stored(values, chunks[0])
                size += write_shard(path, stored)
                weight_map |= dict.fromkeys(stored, file)
        gathered = ranks.gather((weight_map, size))
        with ranks.together(text):
            if ranks.rank == 0:
                remove_weights(where)
        with ranks.together(text):
            for file, path in zip(files, partial, strict=True):
                path.replace(where / file)
        with ranks.together(text):
            if ranks.rank == 0:
                if sum(counts) > 1:
                    everywhere = {name: file for each, _ in gathered for name, file in each.items()}
                    write_index(where, everywhere, sum(each for _, each in gathered))
                weights.write_configuration(where, chunks[0])
    finally:
        for path in partial:
            path.unlink(missing_ok=True)


class _Saved:
    def __init__(
        self, path: Path, names: Iterable[str], weights: Weights, like: Mapping[str, Tensor], rank: int
    ) -> None:
        self._contents: Contents = open_checkpoint(path, trust_pickles=False, rank=rank)
        self._like = like
        entries = self._contents.metadata.state_dict_metadata
        self._keys: dict[str, str] = {}
        for name in names:
            every = [f"{replica}model.{each}" for each in weights.tied(name) for replica in ("replicas.0.", "")]
            key = next((key for key in every if key in entries), None)
            if key is None:
                raise ConfigError(f"checkpoint {path} lacks {name!r}, must have all entries of the model")
            shape = getattr(entries[key], "size", None)
            if shape != like[name].shape:
                theirs = "no tensor" if shape is None else f"of shape {tuple(shape)}"
                raise ConfigError(f"{name!r} is {theirs} in checkpoint {path}, must be {tuple(like[name].shape)}")
            self._keys[name] = key
        self._contents.check(sorted(self._contents.files(self._keys.values())))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """In memory of their own."""
        like = self._like
        entries: dict[str, Any] = {
            self._keys[name]: torch.empty(like[name].shape, dtype=like[name].dtype) for name in names
        }
        with failures(f"checkpoint {self._contents.path} cannot be read", Ranks()):
            dcp.load(entries, storage_reader=self._contents.reader(), planner=self._contents.planner(), no_dist=True)
        return {name: entries[self._keys[name]] for name in names}


def _check_equal(paths: Mapping[str, Path | None], ranks: Ranks) -> None:
    """Refuse paths of which other ranks have others: each would write, or read, a part of something else."""
    for name, path in paths.items():
        every = ranks.gather(None if path is None else str(path))
        for rank, other in enumerate(every):
            if other != every[0]:
                raise ConfigError(f"{name} is {every[0]!r} on rank 0 and {other!r} on rank {rank}, must be the same")


def _chosen(path: Path, ranks: Ranks) -> Path:
    if ranks.from_first((path / METADATA).is_file()):
        return path
    newest = latest(path)
    if newest is None:
        raise ConfigError(f"checkpoint is {str(path)!r}, must be a complete checkpoint, or a folder that has one")
    return newest


def _bytes_of(size: Any) -> int:
    match = _SIZE.fullmatch(size.upper()) if isinstance(size, str) else None
    if match is not None:
        return int(match[1]) * _UNITS[match[2]]
    if type(size) is not int or size < 1:
        raise ConfigError(f"max_shard_size is {shown(size)}, must be a whole number of bytes >= 1, or such as '5GB'")
    return size


def _stages(modules: Any) -> Sequence[SplitStage]:
    if isinstance(modules, SplitStage):
        return [modules]
    if isinstance(modules, Split):
        return list(modules)
    raise ConfigError(f"modules is a {type(modules).__name__}, must be a stage of rrfp.split, or all of them")


def _owned(groups: Sequence[Group], names: Sequence[str], ranks: Ranks) -> list[Group]:
    others = [[tuple(group) for group in each] for each in ranks.gather(groups)]
    everywhere = {name for each in others for group in each for name in group}
    if lacking := [name for name in names if name not in everywhere]:
        raise ConfigError(
            f"no rank has {lacking[0]!r}, the ranks must have all entries of the model: call it on every rank with its "
            "own stage, or in one process with all stages"
        )
    before = {group for each in others[: ranks.rank] for group in each}
    return [group for group in groups if group not in before]


def _check(names: Iterable[str], entries: Mapping[str, Tensor], weights: Weights, *, is_saved: bool) -> None:
    for name in names:
        tensor = entries[name]
        if isinstance(tensor, DTensor) and not is_saved:
            raise ConfigError(
                f"{name!r} is a DTensor, must be a plain tensor: save with rrfp.checkpoint.save, and pass the "
                "folder as checkpoint="
            )
        if tensor.is_meta and not is_saved:
            raise ConfigError(f"{name!r} is on the meta device, must have values: load them, or pass checkpoint=")
        if tensor.shape != weights.shapes[name]:
            raise ConfigError(f"{name!r} is of shape {tuple(tensor.shape)}, must be {tuple(weights.shapes[name])}")


def _shards(groups: Iterable[Group], entries: Mapping[str, Tensor], limit: int) -> list[list[Group]]:
    """Groups by file, each of at most ``limit`` bytes if it has several."""
    shards: list[list[Group]] = []
    room = 0
    for group in groups:
        size = sum(entries[name].nbytes for name in group)
        if size > room or not shards:
            shards.append([])
            room = limit
        shards[-1].append(group)
        room -= size
    return shards
