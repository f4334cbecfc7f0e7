"""The memory rules that ship, explored: no deadlock, and D, received and buffered inputs within their bounds."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from rrfp.lab.explore.cases import Backward, ChainCase, Grid, Where, explored
from rrfp.lab.explore.search import explore
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Layout
from rrfp.model.tasks import Kind, Mode

TRAIN, FORWARD = (Mode.TRAIN,), (Mode.FORWARD,)
EVERYWHERE: tuple[Where, ...] = ("all", "last", "middle")

#: States of these run into the hundreds of thousands.
many_states = [pytest.mark.long, pytest.mark.timeout(600)]

#: The numbers of stages at which a rule shows all that it does; four add states and take most of the time.
STAGES = [1, 2, 3, pytest.param(4, marks=many_states)]


def assert_safe(cases: Iterable[ChainCase]) -> None:
    done = list(explored(cases))
    assert done
    for one in done:
        assert one.is_safe, f"{one.case}: {one.broken}\n{one.exploration}"


@pytest.mark.every_other
@pytest.mark.parametrize("backward", ["whole", "split", "mixed"])
@pytest.mark.parametrize("stages", STAGES)
def test_one_chunk_a_stage_at_any_limit(stages: int, backward: Backward) -> None:
    assert_safe(Grid(stages=(stages,), chunks=(1,), backwards=(backward,), modes=TRAIN))


@pytest.mark.every_other
@pytest.mark.parametrize("layout", ["looped", "v"])
@pytest.mark.parametrize("stages", STAGES)
def test_forward_only_at_any_limit(stages: int, layout: Layout) -> None:
    assert_safe(Grid(stages=(stages,), layouts=(layout,), modes=FORWARD, rules=("staircase",)))


def test_forward_only_the_papers_rule_is_the_staircase() -> None:
    """Serving would free nothing there, and D would pass K * C without end."""
    grid = Grid((2, 3), (3, 4), (2,), modes=FORWARD, limits=(1, 2), rules=("staircase", "paper"))
    done = list(explored(grid))
    by_rule = [[one.exploration for one in done if one.case.rule == rule] for rule in grid.rules]
    assert by_rule[0] == by_rule[1]
    assert by_rule[0]


@pytest.mark.every_other
@pytest.mark.parametrize("backward", ["whole", "split", "mixed"])
@pytest.mark.parametrize("layout", ["looped", "v"])
@pytest.mark.parametrize("stages", STAGES)
def test_the_staircase_with_two_chunks(stages: int, layout: Layout, backward: Backward) -> None:
    microbatches = (1, 2) if backward == "mixed" else (1, 2, 3)
    assert_safe(Grid((stages,), microbatches, (2,), (layout,), (backward,), TRAIN, rules=("staircase",)))


@pytest.mark.every_other
@pytest.mark.parametrize("backward", ["whole", pytest.param("split", marks=many_states)])
@pytest.mark.parametrize("layout", ["looped", "v"])
@pytest.mark.parametrize("stages", [1, 2, *(pytest.param(n, marks=many_states) for n in (3, 4))])
def test_the_staircase_with_two_chunks_and_four_microbatches(stages: int, layout: Layout, backward: Backward) -> None:
    assert_safe(Grid((stages,), (4,), (2,), (layout,), (backward,), TRAIN, rules=("staircase",)))


@pytest.mark.parametrize("stages", [1, 2, pytest.param(3, marks=many_states)])
def test_the_staircase_with_three_chunks(stages: int) -> None:
    assert_safe(Grid((stages,), (1, 2, 3), (3,), ("looped", "v"), ("whole",), TRAIN, rules=("staircase",)))


@pytest.mark.every_other
@pytest.mark.parametrize("layout", ["looped", "v"])
@pytest.mark.parametrize(
    ("stages", "microbatches", "backward"),
    [
        (1, 4, "whole"),
        (2, 3, "whole"),
        pytest.param(3, 3, "whole", marks=many_states),
        pytest.param(4, 2, "whole", marks=many_states),
        (1, 3, "split"),
        (2, 2, "split"),
        pytest.param(3, 2, "split", marks=many_states),
    ],
)
def test_the_papers_rule(stages: int, microbatches: int, backward: Backward, layout: Layout) -> None:
    upto = range(1, microbatches + 1)
    assert_safe(Grid((stages,), upto, (2,), (layout,), (backward,), TRAIN, rules=("paper",)))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["looped", "v"])
@pytest.mark.parametrize(
    ("stages", "microbatches", "backward"), [(4, 3, "whole"), (2, 4, "whole"), (4, 2, "split"), (3, 3, "split")]
)
def test_the_papers_rule_in_larger_cases(stages: int, microbatches: int, backward: Backward, layout: Layout) -> None:
    assert_safe(Grid((stages,), (microbatches,), (2,), (layout,), (backward,), TRAIN, rules=("paper",)))


@pytest.mark.parametrize("kind", [Kind.F, Kind.B, Kind.W])
def test_a_forced_order_with_one_chunk(kind: Kind) -> None:
    backwards: tuple[Backward, ...] = ("whole", "split")
    grid = Grid((1, 2, 3), (1, 2, 3), (1,), ("looped",), backwards, TRAIN, in_order=(kind,), where=EVERYWHERE)
    assert_safe(grid)


@pytest.mark.parametrize("stages", STAGES)
def test_natural_order_with_one_chunk(stages: int) -> None:
    assert_safe(Grid((stages,), chunks=(1,), in_order=("natural",), rules=("staircase",)))


@pytest.mark.every_other
@pytest.mark.parametrize("backward", ["whole", "split"])
@pytest.mark.parametrize("layout", ["looped", "v"])
@pytest.mark.parametrize("stages", [1, 2, *(pytest.param(n, marks=many_states) for n in (3, 4))])
def test_natural_order_with_two_chunks(stages: int, layout: Layout, backward: Backward) -> None:
    microbatches = (1, 2, 3, 4) if stages in (1, 3) else (1, 2, 3)
    assert_safe(Grid((stages,), microbatches, (2,), (layout,), (backward,), in_order=("natural",)))


@pytest.mark.every_other
@pytest.mark.parametrize("kind", [Kind.F, Kind.B, Kind.W])
@pytest.mark.parametrize(
    ("stages", "microbatches"),
    [(1, 2), (2, 2), *(pytest.param(*sizes, marks=many_states) for sizes in ((1, 3), (3, 2)))],
)
def test_a_forced_order_with_two_chunks(stages: int, microbatches: int, kind: Kind) -> None:
    """Staircase and reserve rule together, where one reserved slot is not enough."""
    backward: Backward = "split" if kind is Kind.W else "whole"
    grid = Grid((stages,), (microbatches,), (2,), ("looped", "v"), (backward,), TRAIN, in_order=(kind,))
    assert_safe(grid)


@pytest.mark.parametrize("backward", ["whole", "split"])
@pytest.mark.parametrize("layout", ["looped", "v"])
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stages", [2, 3])
def test_a_forced_order_with_two_chunks_and_three_microbatches(stages: int, layout: Layout, backward: Backward) -> None:
    kinds = (Kind.F, Kind.B, Kind.W) if backward == "split" else (Kind.F, Kind.B)
    assert_safe(Grid((stages,), (3,), (2,), (layout,), (backward,), TRAIN, rules=("staircase",), in_order=kinds))


@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=many_states)])
@pytest.mark.parametrize("in_order", [None, Kind.B])
@pytest.mark.parametrize("microbatches", [None, 1, 2])
def test_byte_limits_beside_a_limit_on_microbatches(
    chunks: int, in_order: Kind | None, microbatches: int | None
) -> None:
    """Microbatches of even and of uneven sizes, some of which never fit."""
    graph = TaskGraph.chain(2, chunks=chunks, layout="v")
    forced = [(in_order, v) for v in range(2 * chunks)] if in_order else []
    for num_bytes in (1, 2, 3, 5, 8):
        for sizes in ((1, 1, 1), (1, 2, 4), (4, 2, 1)):
            found = explore(graph, 3, Limit(microbatches, num_bytes), in_order=forced, sizes=sizes)
            assert not found.deadlocks, (num_bytes, sizes, found)


@pytest.mark.parametrize("growth", [1, 3])
@pytest.mark.parametrize("in_order", [None, Kind.W])
@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=many_states)])
def test_byte_limits_under_which_weight_tasks_go_first(chunks: int, in_order: Kind | None, growth: int) -> None:
    """Split backwards add to what is held, and are held back while they do not fit."""
    graph = TaskGraph.chain(2, chunks=chunks, layout="v", split=True)
    forced = [(in_order, v) for v in range(2 * chunks)] if in_order else []
    for num_bytes in (1, 3, 5, 8):
        for estimates in (None, (1, 2, 4)):
            found = explore(
                graph,
                3,
                Limit(None, num_bytes),
                in_order=forced,
                sizes=(1, 2, 4),
                estimates=estimates,
                growth=growth,
            )
            assert not found.deadlocks, (num_bytes, estimates, found)


@pytest.mark.parametrize("in_order", [None, Kind.B])
@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=many_states)])
@pytest.mark.parametrize("estimates", [(1, 2, 4), (0, 0, 0), (9, 1, 0), (1, 1, 7)])
def test_byte_limits_with_exact_absent_and_wrong_estimates(
    estimates: tuple[int, ...], chunks: int, in_order: Kind | None
) -> None:
    graph = TaskGraph.chain(2, chunks=chunks, layout="v", split=True)
    forced = [(in_order, v) for v in range(2 * chunks)] if in_order else []
    for num_bytes in (1, 3, 5, 8):
        found = explore(graph, 3, Limit(None, num_bytes), in_order=forced, sizes=(1, 2, 4), estimates=estimates)
        assert not found.deadlocks, (num_bytes, found)
