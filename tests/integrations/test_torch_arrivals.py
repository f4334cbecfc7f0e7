"""Who has come to an exchange, according to a store that the ranks share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, Store  # type: ignore[attr-defined]

from rrfp.integrations.torch.limits import STAGES, ReceiveWatch, shapes_of


def ranks(store: Store | None, exchange: Any = STAGES, *, count: int = 4) -> list[ReceiveWatch]:
    """Every rank's view of the exchanges of a group that has ``store``, or no store at all."""
    group = SimpleNamespace() if store is None else SimpleNamespace(get_group_store=lambda: store)
    stages: list[Any] = [SimpleNamespace(group=group, group_rank=rank, group_size=count) for rank in range(count)]
    return [ReceiveWatch(stage, exchange) for stage in stages]


@pytest.mark.parametrize("is_file", [False, True])
def test_the_ranks_that_have_not_come_are_named(is_file: bool, tmp_path: Path) -> None:
    first, second, third, fourth = ranks(FileStore(str(tmp_path / "store"), 4) if is_file else HashStore())
    assert first.missing() == ""
    for came in (third, first):
        came.come()
    assert first.missing() == "of the stages' group ranks 1, 3 have not built its ScheduleRRFP; "
    second.come()
    assert third.missing() == "of the stages' group rank 3 has not built its ScheduleRRFP; "
    fourth.come()
    assert [each.missing() for each in (first, fourth)] == ["every rank of the stages' group has come to it; "] * 2


def test_exchanges_of_one_kind_are_counted() -> None:
    """By a view of each schedule, too: the store has the count."""
    store = HashStore()
    for each in ranks(store, count=2):
        each.come()
    again, _ = ranks(store, count=2)
    again.come()
    assert again.missing() == "of the stages' group rank 1 has not built its ScheduleRRFP; "
    other, _ = ranks(store, shapes_of(0xA), count=2)
    other.come()
    assert other.missing() == "of the stages' group rank 1 has not called step or eval; "


def test_where_no_store_says_it_no_rank_is_named() -> None:
    first, _ = ranks(None, count=2)
    first.come()
    assert first.missing() == ""
