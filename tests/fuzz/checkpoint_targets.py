"""Readers of a checkpoint's files, in which damage, or whoever may write there, has put anything."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch
from fuzz.file_targets import MEMORY
from fuzz.mutations import MSGPACK, Nest
from fuzz.targets import Decode, Target, plain
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rrfp import checkpoint
from rrfp.checkpoint.plain import read
from rrfp.errors import RrfpError

METADATA, SUMS = ".metadata", "SHA256SUMS"


class Made:
    """Pickles as the call that it is given, whatever that would make."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call


def _as_tuple(value: Any) -> Any:
    return tuple(value) if type(value) is list else value


# --- What torch.save wrote ---------------------------------------------------

_RECONSTRUCT, _SCALAR = np.zeros(0).__reduce__()[0], np.float64().__reduce__()[0]
_CODES = ("f8", ">f8", "i4", "U4", "S3", "b1", "c16", "f2")


def _an_object(random: Random) -> Any:
    """An array and a number, in the parts that their pickles have, and other values."""
    code = random.choice(_CODES)
    array = np.array(["ab", "c"], code) if code[0] in "US" else np.ones((2, 1), code)
    _, arguments, state = cast("Any", array.dtype.__reduce__())
    return {
        "dtype": [*arguments],
        "dtype state": [*state],
        "kind": [[0], b"b"],
        "array": [1, [2, 1], random.random() < 0.5, array.tobytes()],
        "number": array[0].tobytes(),
        "values": [1, 2.5, "x", None, {"a": [True]}, b"y"],
    }


def _saved(tree: Any) -> bytes:
    """As `torch.save` writes it; nests, which it does not take, as text."""
    value: Any = tree
    if type(tree) is dict and {"dtype", "dtype state", "kind", "array", "number"} <= tree.keys():
        dtype = Made(np.dtype, _as_tuple(tree["dtype"]), _as_tuple(tree["dtype state"]))
        kind, array = (each if type(each) is list else [each] for each in (tree["kind"], tree["array"]))
        state = (*array[:1], *map(_as_tuple, array[1:2]), dtype, *array[2:])
        made = Made(_RECONSTRUCT, (np.ndarray, *map(_as_tuple, kind)), state)
        value = {"array": made, "number": Made(_SCALAR, (dtype, tree["number"])), "values": tree.get("values")}
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except (pickle.PicklingError, TypeError, RecursionError):
        stream = io.BytesIO()
        torch.save(repr(tree), stream)
    return stream.getvalue()


def _read_object(case: bytes) -> str:
    """Looked at, too: an array that is wrong fails then."""
    return repr(read(io.BytesIO(case), trust_pickles=False))


# --- The metadata and the digests --------------------------------------------


def _module() -> nn.Module:
    return nn.Linear(3, 2)


@cache
def _files() -> dict[str, bytes]:
    """Those of a good checkpoint."""
    with TemporaryDirectory(dir=MEMORY) as folder:
        path = checkpoint.save(folder, _module(), step=3, extra={"seen": [1, 2]})
        return {each.name: each.read_bytes() for each in path.iterdir()}


@contextmanager
def _loads(damaged: str) -> Iterator[Decode]:
    """Loads a good checkpoint in which one file is the case; the metadata is then the one without digests."""
    with TemporaryDirectory(dir=MEMORY) as folder:
        path = Path(folder) / "000001-step-3"
        path.mkdir()
        for name, content in _files().items():
            (path / name).write_bytes(content)
        if damaged == METADATA:
            (path / SUMS).unlink()

        def decode(case: bytes) -> object:
            (path / damaged).write_bytes(case)
            return checkpoint.load(folder, _module(), path=path)

        yield decode


def _loads_metadata() -> Any:
    return _loads(METADATA)


def _loads_sums() -> Any:
    return _loads(SUMS)


@cache
def _known() -> Metadata:
    metadata: Metadata = pickle.loads(_files()[METADATA])
    return metadata


def _a_metadata(random: Random) -> Any:
    """The metadata of the good checkpoint as plain data."""
    entries = [
        [name, *([[*each.size], _dtype(each)] if isinstance(each, TensorStorageMetadata) else [])]
        for name, each in _known().state_dict_metadata.items()
        if name != SUMS
    ]
    storage = [
        [index.fqn, None if index.offset is None else [*index.offset], index.index, *_location(each)]
        for index, each in _known().storage_data.items()
        if index.fqn != SUMS
    ]
    return {"entries": entries, "storage": storage}


def _dtype(entry: TensorStorageMetadata) -> str:
    return str(entry.properties.dtype).removeprefix("torch.")


def _location(info: Any) -> list[Any]:
    return [info.relative_path, info.offset, info.length]


def _as_metadata(tree: Any) -> bytes:
    """The pickle that `torch.distributed.checkpoint` writes of it, and of damage as much as can be."""
    try:
        entries = {row[0]: _entry(*row[1:]) for row in tree["entries"]}
        storage = {MetadataIndex(row[0], _size(row[1]), row[2]): _StorageInfo(*row[3:]) for row in tree["storage"]}
        return pickle.dumps(Metadata(entries, storage_data=storage))
    except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
        try:
            return pickle.dumps(tree)
        except (AttributeError, RecursionError, TypeError):
            return repr(tree).encode(errors="replace")


def _entry(size: Any = None, dtype: Any = None) -> Any:
    if size is None:
        return BytesStorageMetadata()
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), _size(size))
    return TensorStorageMetadata(TensorProperties(getattr(torch, dtype)), _size(size), [chunk])


def _size(value: Any) -> Any:
    return torch.Size(value) if type(value) is list else value


def _sums(random: Random) -> Any:
    return [line.split("  ") for line in _files()[SUMS].decode().splitlines()]


def _as_sums(tree: Any) -> bytes:
    rows = ["  ".join(map(str, row)) if type(row) is list else str(row) for row in tree] if type(tree) is list else [""]
    return "\n".join(rows).encode(errors="surrogatepass")


#: Without nests, which pickle to no end.
_VALUES = [value for value in MSGPACK if not isinstance(value, Nest)]

TARGETS: tuple[Target, ...] = (
    Target("plain", (ValueError, pickle.UnpicklingError), _an_object, _saved, _VALUES, plain(_read_object)),
    Target("checkpoints", (RrfpError,), _a_metadata, _as_metadata, _VALUES, _loads_metadata),
    Target("digests", (RrfpError,), _sums, _as_sums, _VALUES, _loads_sums),
)
