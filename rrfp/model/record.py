"""Plain data that is made millions of times: a dataclass that is frozen for type checkers only.

A truly frozen dataclass sets each field through `object.__setattr__`, which makes it three times as slow to construct,
and the core makes some eight of them a task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Make ``cls`` a dataclass with slots, compared and hashed by its fields, which must not be assigned afterwards.

    mypy refuses an assignment to a field; nothing does at run time.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
