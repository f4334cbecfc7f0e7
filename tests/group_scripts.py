"""Cores of a tensor-parallel group; a test passes them by hand the messages of its other ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core_script import Script, T

from rrfp.core.events import (
    Ordered,
    ReadyReported,
)
from rrfp.core.group_step import GroupMembership
from rrfp.errors import ProtocolError
from rrfp.model.graph import TaskGraph

CHAIN = TaskGraph.chain(2)


def leader(stage: int = 1, size: int = 2, graph: TaskGraph = CHAIN) -> Script:
    return Script(graph, stage, group=GroupMembership(0, size))


def follower(stage: int = 1, graph: TaskGraph = CHAIN) -> Script:
    return Script(graph, stage, group=GroupMembership(1, 2))


def reported(script: Script, task: str, rank: int = 1) -> list[object]:
    return [*script.told(ReadyReported(script.step, rank, T(task)))]


def ordered(script: Script, *entries: tuple[int, str]) -> list[object]:
    return [*script.told(*(Ordered(script.step, sequence, T(task)) for sequence, task in entries))]


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(ProtocolError) as caught:
        act()
    return str(caught.value)
