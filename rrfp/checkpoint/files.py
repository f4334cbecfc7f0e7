"""The files of one checkpoint: what torch.distributed.checkpoint lacks is that they are checked, and run no code.

``SHA256SUMS`` has the digests of all of them, in the form of the program ``sha256sum``. It is there before
``.metadata``, which makes the checkpoint complete.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rrfp.checkpoint import plain

T = TypeVar("T")

METADATA, SUMS = ".metadata", "SHA256SUMS"

#: An entry of this name says that there are digests, so that a lost file of them is noticed. Older ones have none.
SUMS_ENTRY = SUMS

_SUM = re.compile(r"([0-9a-f]{64})  (\S+)")


class DamagedFileError(Exception):
    """A file of a checkpoint is not what was written; the text names it."""


# --- Writing -----------------------------------------------------------------


class Writer(FileSystemWriter):
    """Writes digests of all files, which each rank makes of what it writes, while it writes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs: _SummedFiles = _SummedFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As the base; the digests go to rank 0 with the results."""
        results = super().write_data(plan, planner).wait()
        sums = [WriteResult(MetadataIndex(name), 0, _Sum(value)) for name, value in self.fs.sums.items()]
        written: Future[list[WriteResult]] = Future()
        written.set_result([*results, *sums])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """As the base: on rank 0, when all ranks have written."""
        for each in (each for own in results for each in own if isinstance(each.storage_data, _Sum)):
            self.fs.sums[each.index.fqn] = each.storage_data
        super().finish(metadata, [[each for each in own if not isinstance(each.storage_data, _Sum)] for own in results])


class _Sum(str):
    __slots__ = ()


class _SummedFiles(FileSystem):
    def __init__(self) -> None:
        self.sums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            summed = _SummedStream(cast("IO[bytes]", stream))
            try:
                yield cast("io.IOBase", summed)
            except RuntimeError:  # torch.save names a position in the file where a write has failed
                if summed.failure is None:
                    raise
                raise summed.failure from None
        self.sums[Path(path).name] = summed.digest.hexdigest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Of the metadata, the only file that is renamed: with it the checkpoint is complete."""
        target = Path(new_path)
        self.sums[target.name] = self.sums.pop(Path(path).name)
        with (target.parent / SUMS).open("w") as file:
            file.writelines(f"{value}  {name}\n" for name, value in sorted(self.sums.items()))
            file.flush()
            os.fsync(file.fileno())
        super().rename(path, new_path)


class _SummedStream:
    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            return self._stream.write(data)
        except OSError as error:
            self.failure = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class EntriesPlanner(DefaultSavePlanner):
    """Writes entries that are flat: a list or dict among them is one value, read as a whole."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """As the base, with the names that torch's tools look for."""
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = {name: (name,) for name in metadata.state_dict_metadata}
        return plans, metadata


# --- Reading -----------------------------------------------------------------


class Contents(NamedTuple):
    """A checkpoint whose metadata was read."""

    path: Path
    #: Its entries, and where each lies.
    metadata: Metadata
    #: The digests of its files by name; None if it has none.
    sums: dict[str, str] | None
    #: Whether what is no plain data may be unpickled.
    trust_pickles: bool

    @classmethod
    def of(cls, path: Path, *, trust_pickles: bool) -> Contents:
        raw = (path / METADATA).read_bytes()
        sums = _read_sums(path)
        if sums is not None:
            _compare(METADATA, hashlib.sha256(raw).hexdigest(), sums)
        try:
            metadata = pickle.loads(raw) if trust_pickles else _metadata(_unpickled(raw))
            has_sums = SUMS_ENTRY in metadata.state_dict_metadata
        except Exception as error:  # of bytes that are no pickle, or one of something else
            raise DamagedFileError(
                f"{METADATA} is damaged, or no metadata of torch.distributed.checkpoint ({type(error).__name__})"
            ) from error
        if sums is None and has_sums:
            raise DamagedFileError(f"{SUMS} is not there: sha256sum makes it anew, if you trust the other files")
        return cls(path, metadata, sums, trust_pickles)

    def files(self, entries: Iterable[str]) -> set[str]:
        wanted = set(entries)
        return {each.relative_path for index, each in self.metadata.storage_data.items() if index.fqn in wanted}

    def check(self, files: Sequence[str]) -> None:
        for name in files if self.sums is not None else ():
            with (self.path / name).open("rb") as file:
                _compare(name, hashlib.file_digest(file, "sha256").hexdigest(), self.sums)

    def reader(self) -> FileSystemReader:
        return _Reader(self.path, self.metadata)

    def planner(self) -> LoadPlanner:
        return _LoadPlanner(trust_pickles=self.trust_pickles)


class _Reader(FileSystemReader):
    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """As read before: torch's own would unpickle it."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As the base; an error names the file."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                super().read_data(replace(plan, items=items), planner)
            except OSError:  # has it
                raise
            except plain.NotPlainError as error:
                raise plain.NotPlainError(f"{name} {error}") from error
            except Exception as error:
                reason = str(error).partition("\n")[0]
                raise RuntimeError(f"{name} cannot be loaded: {type(error).__name__}: {reason}") from error
        read: Future[None] = Future()
        read.set_result(None)
        return read


class _LoadPlanner(DefaultLoadPlanner):
    """Reads what is no tensor without running code."""

    def __init__(self, *, trust_pickles: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._trust_pickles = trust_pickles

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = plain.read(value, trust_pickles=self._trust_pickles)


def _read_sums(path: Path) -> dict[str, str] | None:
    if not (path / SUMS).exists():
        return None
    lines = (path / SUMS).read_bytes().decode("ascii", "replace").splitlines()
    matches = [_SUM.fullmatch(line) for line in lines]
    if not lines or None in matches:
        raise DamagedFileError(f"{SUMS} is damaged: it must have a digest and a name in each line")
    return {match[2]: match[1] for match in matches if match}


def _compare(name: str, value: str, sums: dict[str, str] | None) -> None:
    if sums is None:
        return
    if name not in sums:
        raise DamagedFileError(f"{SUMS} is damaged: it lacks {name}")
    if value != sums[name]:
        raise DamagedFileError(f"{name} is damaged: its digest is another one than in {SUMS}")


class _Standin:
    """In the place of every class and function that the metadata names: holds what it was given, and runs nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _MetadataUnpickler(pickle.Unpickler):
    """Imports nothing, calls nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        known = {"torch.Size": torch.Size, "collections.OrderedDict": OrderedDict}
        # A class of its own, since a pickle may set the attributes of what it finds.
        return known.get(f"{module}.{name}") or type(name, (_Standin,), {})


def _unpickled(raw: bytes) -> Any:
    # Python's reader makes room for the highest number of a part before it reads that part: terabytes, of damage.
    if any("PUT" in opcode.name and int(argument or 0) > len(raw) for opcode, argument, _ in pickletools.genops(raw)):
        raise ValueError("it numbers more parts than it can have")
    return _MetadataUnpickler(io.BytesIO(raw)).load()


_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def _metadata(raw: Any) -> Metadata:
    """The metadata that stand-ins describe; an exception of any kind if they do not."""
    state = _fields(raw, Metadata)
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, each in _of(state["state_dict_metadata"], dict).items():
        _of(name, str)
        if type(each).__name__ == "BytesStorageMetadata":
            entries[name] = BytesStorageMetadata()
            continue
        tensor = _fields(each, TensorStorageMetadata)
        chunks = [_fields(chunk, ChunkStorageMetadata) for chunk in tensor["chunks"]]
        if type(tensor["properties"]).__name__ != "TensorProperties":
            raise TypeError
        entries[name] = TensorStorageMetadata(
            TensorProperties(dtype=_of(tensor["properties"].state[0], torch.dtype)),
            _of(tensor["size"], torch.Size),
            [
                ChunkStorageMetadata(_of(chunk["offsets"], torch.Size), _of(chunk["sizes"], torch.Size))
                for chunk in chunks
            ],
        )
    storage = {_index(index): _location(location) for index, location in state["storage_data"].items()}
    return Metadata(entries, storage_data=storage)


def _index(raw: Any) -> MetadataIndex:
    state = _fields(raw, MetadataIndex)
    offset, index = state.get("offset"), state.get("index")
    return MetadataIndex(
        _of(state["fqn"], str),
        None if offset is None else _of(offset, torch.Size),
        None if index is None else _of(index, int),
    )


def _location(raw: Any) -> _StorageInfo:
    state = _fields(raw, _StorageInfo)
    name = _of(state["relative_path"], str)
    if Path(name).name != name:
        raise ValueError  # of another folder
    transforms = state.get("transform_descriptors")
    # Not in older versions of torch.
    more = {} if transforms is None else {"transform_descriptors": [_of(each, str) for each in transforms]}
    return _StorageInfo(name, _of(state["offset"], int), _of(state["length"], int), **more)


def _fields(raw: Any, kind: type) -> dict[str, Any]:
    if not isinstance(raw, _Standin) or type(raw).__name__ != kind.__name__:
        raise TypeError
    return _of(raw.state, dict)


def _of(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError
    return value
