"""The caller's iterators of batches: one for each model chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rrfp.errors import ConfigError, StageError


def listed_iterators(data_iterator: Any, chunks: int) -> list[Any]:
    """What each chunk draws from, as it was passed; a ConfigError where their number is not that of the chunks."""
    if not isinstance(data_iterator, list):
        if chunks > 1:
            raise ConfigError(
                f"data_iterator is a {type(data_iterator).__name__}, must be a list with one iterator for each of the "
                f"{chunks} model chunks"
            )
        return [data_iterator]
    if len(data_iterator) != chunks:
        raise ConfigError(
            f"data_iterator has {len(data_iterator)} iterators, must have one for each model chunk: {chunks}"
        )
    shared = {id(each): each for each in data_iterator if hasattr(each, "__next__") and data_iterator.count(each) > 1}
    drawn: dict[int, int] = {}
    return [
        _SharedIterator(each, chunk, drawn) if id(each) in shared else each for chunk, each in enumerate(data_iterator)
    ]


class _SharedIterator:
    """An iterator that several chunks were given: one of them may draw, as the order between chunks is free."""

    def __init__(self, source: Iterator[Any], chunk: int, drawn: dict[int, int]) -> None:
        self._source = source
        self._chunk = chunk
        #: By iterator, the chunk that draws from it.
        self._drawn = drawn

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        first = self._drawn.setdefault(id(self._source), self._chunk)
        if first != self._chunk:
            raise StageError(
                f"chunks {first} and {self._chunk} draw from one data_iterator, and forwards of chunks run in any "
                "order: each must have an iterator of its own"
            )
        return next(self._source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)
