"""Every interleaving of small steps whose replicas share forwards: no deadlock, limits kept, each microbatch once."""

from __future__ import annotations

import pytest

from rrfp.core.claims import Grants
from rrfp.lab.explore.claims import ClaimCase, ClaimSearch

QUICK = [
    ClaimCase(1, 2, (0, 0)),
    ClaimCase(1, 2, (0, 0, 1), paces=(3.0, 1.0)),
    ClaimCase(2, 2, (0,)),
    ClaimCase(1, 2, (0, 0, 1), limit=2, most_bytes=3, sizes=(1, 2, 3)),
    ClaimCase(1, 2, (0, 1), split=True, chunks=2),
]
ALL = [
    ClaimCase(2, 2, (0, 0), limit=2, most_bytes=1, sizes=(1, 2)),
    ClaimCase(1, 2, (0, 0, 1), limit=3, depth=2, split=True, most_bytes=3, sizes=(1, 2, 2)),
    ClaimCase(2, 2, (0,), chunks=2),
    ClaimCase(2, 2, (0,), chunks=2, layout="v", split=True),
    ClaimCase(2, 2, (0, 1), chunks=2, layout="v"),
    ClaimCase(2, 2, (0,), chunks=3, layout="v", depth=2),
    ClaimCase(1, 2, (0, 0, 1)),
    ClaimCase(1, 3, (0, 0, 1), split=True),
    ClaimCase(1, 2, (0, 0, 0, 1), limit=2, depth=2),
    ClaimCase(2, 2, (0,), split=True),
    ClaimCase(2, 2, (0, 1)),
    ClaimCase(2, 2, (0, 0), limit=2, depth=2),
    ClaimCase(3, 2, (0,)),
]


#: Minutes of states.
LONG = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=LONG) for case in ALL)], ids=str)
def test_no_interleaving_deadlocks_passes_a_limit_or_runs_a_task_twice(case: ClaimCase) -> None:
    found = ClaimSearch(case).run()
    assert not found.wrong
    assert found.ends
    assert found.peak_held <= case.limit * case.chunks


def test_without_paces_every_copy_may_run_every_forward() -> None:
    found = ClaimSearch(ClaimCase(1, 2, (0, 0))).run()
    # The holder takes one at once; the other goes to whichever asks first.
    assert found.takers == {((0, 0),), ((0, 1),)}


def test_a_holder_that_grants_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def grant(self: Grants, microbatch: int, copy: int) -> bool:
        self.takers[microbatch] = copy
        return True

    monkeypatch.setattr(Grants, "claim", grant)
    assert ClaimSearch(ClaimCase(1, 2, (0, 0))).run().wrong
