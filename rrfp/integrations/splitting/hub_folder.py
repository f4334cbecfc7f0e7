"""A folder as the Hub has it: safetensors files, several of them with an index. Nothing in it is unpickled.

Files are read and written here and not by the library ``safetensors``. It maps a file into memory, where its pages
count as the process's own, or reads an entry into memory of its own: a rank would hold its largest tensor twice. To
write, it copies all entries of a file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rrfp.atomic_files import write_atomically
from rrfp.errors import ConfigError
from rrfp.plain import path_of

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

#: By the names that the file format has for them.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: Of files with weights; transformers reads one that an earlier save has left.
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")

#: The format allows no longer header.
_HEADER_BYTES = 100 << 20

#: An entry of another dtype than its target is read in pieces of this size.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    path: Path
    dtype: torch.dtype
    shape: torch.Size
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        """In memory of its own."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(tensor)
        return tensor

    def read_into(self, target: Tensor) -> None:
        """Fill ``target``, of the same shape; beside it no more than a piece is in memory."""
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            if target.is_contiguous() and target.is_cpu and target.dtype == self.dtype:
                self._fill(file, target)
                return
            flat = target.view(-1) if target.is_contiguous() else torch.empty(self.shape, dtype=target.dtype).view(-1)
            count = max(1, _PIECE_BYTES // self.dtype.itemsize)
            for part in flat.split(count) if flat.numel() else ():  # type: ignore[no-untyped-call]
                piece = torch.empty(part.shape, dtype=self.dtype)
                self._fill(file, piece)
                part.copy_(piece)
            if not target.is_contiguous():
                target.copy_(flat.view(self.shape))

    def _fill(self, file: Any, target: Tensor) -> None:
        """Read the next bytes of ``file`` into ``target``, which is contiguous."""
        if not target.numel():
            return
        room = memoryview(target.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        while room:  # one call reads 2 GB at most
            if not (count := file.readinto(room)):
                raise _unreadable(self.path, "it ends within an entry")
            room = room[count:]


class HubFolder:
    """The entries of a folder by name; of its files only those are opened that have the entries asked for."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = path_of("folder", folder)
        self._files: dict[str, dict[str, Entry]] = {}
        if (self.path / SINGLE).is_file():  # it goes before an index, as in transformers
            self._file_of = dict.fromkeys(self._entries(SINGLE), SINGLE)
        elif (self.path / INDEX).is_file():
            self._file_of = _weight_map(self.path / INDEX)
        else:
            raise ConfigError(
                f"folder is {str(self.path)!r}, must have {SINGLE}, or {INDEX} and its files, as save_pretrained "
                "writes them and huggingface_hub.snapshot_download fetches them"
            )

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def entry(self, name: str) -> Entry:
        file = self._file_of[name]
        if name not in (entries := self._entries(file)):
            raise ConfigError(f"{self.path / file} lacks {name!r}, must have it: {INDEX} says so")
        return entries[name]

    def is_same(self, name: str, other: str) -> bool:
        first, second = self.entry(name), self.entry(other)
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        count = first.num_bytes
        with first.path.open("rb") as file, second.path.open("rb") as another:
            file.seek(first.offset)
            another.seek(second.offset)
            pieces = (min(_PIECE_BYTES, count - start) for start in range(0, count, _PIECE_BYTES))
            return all(file.read(piece) == another.read(piece) for piece in pieces)

    def _entries(self, name: str) -> dict[str, Entry]:
        if name not in self._files:
            self._files[name] = _entries_of(self.path / name)
        return self._files[name]


def _entries_of(path: Path) -> dict[str, Entry]:
    try:
        with path.open("rb") as file:
            size, length = path.stat().st_size, int.from_bytes(file.read(8), "little")
            if length > min(size, _HEADER_BYTES):
                raise _unreadable(path, "its header is longer than the file")
            header = json.loads(file.read(length))
        entries = {name: each for name, each in header.items() if name != "__metadata__"}
        found = {name: _entry(path, name, each, 8 + length, size) for name, each in entries.items()}
        spans = sorted((each.offset, each.offset + each.num_bytes) for each in found.values())
        if any(stop != start for (_, stop), (start, _) in pairwise([(0, 8 + length), *spans, (size, size)])):
            raise _unreadable(path, "its entries overlap, or leave bytes between them")
        return found
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error


def _entry(path: Path, name: str, raw: Mapping[str, Any], data: int, size: int) -> Entry:
    shape, (start, stop) = raw["shape"], raw["data_offsets"]
    if raw["dtype"] not in DTYPES:
        raise ConfigError(f"{path}: {name!r} is of dtype {raw['dtype']!r}, must be one of: {', '.join(DTYPES)}")
    dtype = DTYPES[raw["dtype"]]
    if any(type(each) is not int or each < 0 for each in (*shape, start, stop)):
        raise _unreadable(path, f"{name!r} has sizes that are no numbers")
    if stop - start != torch.Size(shape).numel() * dtype.itemsize or data + stop > size:
        raise _unreadable(
            path, f"{name!r} is of {stop - start} bytes, which its shape or the file's length contradicts"
        )
    return Entry(path, dtype, torch.Size(shape), data + start)


def _unreadable(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path} cannot be read, must be a complete safetensors file: {reason}")


def _weight_map(path: Path) -> dict[str, str]:
    """The name of the file that has each entry."""
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        are_beside = all(isinstance(file, str) and Path(file).name == file != "" for file in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read, must have a weight_map: {type(error).__name__}: {error}") from error
    if not are_beside:
        raise ConfigError(f"{path} names a file outside of its folder, must name files beside it")
    return dict(weight_map)


def shard_name(index: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"


def write_shard(path: Path, entries: Mapping[str, Tensor]) -> int:
    """Write one file, of which no more than one entry is copied at a time; returns the bytes of its entries."""
    names = sorted(entries, key=lambda name: (-entries[name].itemsize, name))  # so that each is aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = entries[name]
        if tensor.dtype not in _NAMES:
            raise ConfigError(f"{name!r} is of dtype {tensor.dtype}, must be one of: {', '.join(map(str, _NAMES))}")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            if entries[name].numel():
                plain = entries[name].detach().cpu().contiguous().view(-1).view(torch.uint8)
                file.write(memoryview(plain.numpy()))  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    return end


def write_index(folder: Path, weight_map: Mapping[str, str], size: int) -> None:
    content = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_atomically(folder / INDEX, json.dumps(content, indent=2, sort_keys=True) + "\n")


def remove_weights(folder: Path) -> None:
    """Remove the files of an earlier save, the index first: no reader finds half of them."""
    (folder / INDEX).unlink(missing_ok=True)
    for path in folder.iterdir():
        if _WEIGHTS.fullmatch(path.name):
            path.unlink()


def first_of(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"
