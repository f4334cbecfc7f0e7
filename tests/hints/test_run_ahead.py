"""How far encoders run ahead: decision by decision on one stage; and that no step hangs where forwards wait."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from core_script import Script, T
from sim.adversaries import holding_back
from sim.graph_cases import SlotLimit

from rrfp import Hint
from rrfp.core.events import Run
from rrfp.hints.priorities import BackwardForward, ForwardPriority
from rrfp.hints.pyramid import Pyramids
from rrfp.hints.registry import HINTS, create_hint
from rrfp.hints.slot_aware import SlotAware
from rrfp.lab.cluster.random_run import RandomRun
from rrfp.lab.explore.cases import random_visits
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import TablePlacement
from rrfp.model.tasks import Mode
from rrfp.model.visits import Visits

#: On both of two stages a part of an image encoder (0, 1), of an audio encoder (2, 3) and of the model (4, 5).
COLOCATED = TaskGraph(TablePlacement((0, 1, 0, 1, 0, 1)), ((0, 1), (2, 3), (1, 4), (3, 4), (4, 5)))
IMAGE, AUDIO = frozenset({0, 1}), frozenset({2, 3})
SHIPPED = HINTS.names()


def first_stage(
    hint: Hint | None = None,
    *,
    limit: Limit | int | None,
    graph: TaskGraph = COLOCATED,
    mode: Mode = Mode.TRAIN,
    skipped: Sequence[frozenset[int]] = (),
) -> Script:
    """Stage 0 with eight microbatches, whose inputs of the caller are there."""
    return Script(graph, 0, 8, mode, hint=hint or BackwardForward(), limit=limit, skipped=skipped)


@pytest.mark.parametrize("hint", [BackwardForward(), ForwardPriority(), SlotAware(), Pyramids(SlotAware())])
@pytest.mark.parametrize(
    ("limit", "decisions"),
    [
        (2, "F0@2 F0@0 -"),
        (3, "F0@2 F1@2 F0@0 F1@0 -"),
        (4, "F0@2 F1@2 F2@2 F0@0 F1@0 F2@0 -"),
    ],
)
def test_at_most_what_leaves_room_for_half_of_the_pipeline_is_ahead(hint: Hint, limit: int, decisions: str) -> None:
    """Two stages have work while two microbatches are in flight: of K one finds room behind those that are ahead."""
    assert first_stage(create_hint(hint), limit=limit).decisions(len(decisions.split())) == decisions


def test_a_forward_of_the_model_makes_place_for_the_next_one_of_the_encoders() -> None:
    script = first_stage(limit=2)
    assert script.decisions(3) == "F0@2 F0@0 -"
    script.arrived("F0@1", "F0@3")
    assert script.decisions(3) == "F0@4 F1@2 F1@0"


def test_a_backward_runs_while_forwards_are_held_back() -> None:
    script = first_stage(limit=2)
    script.ran("F0@2", "F0@0")
    script.arrived("F0@1", "F0@3")
    script.ran("F0@4", "F1@2", "F1@0")
    assert script.decisions(1) == "-"
    script.arrived("B0@5")
    assert script.decisions(2) == "B0@4 -"


def test_chunks_in_the_papers_order_are_capped_as_well() -> None:
    assert first_stage(BackwardForward("paper"), limit=3).decisions(5) == "F0@0 F1@0 F0@2 F1@2 -"


@pytest.mark.parametrize(
    ("limit", "mode", "graph", "decisions"),
    [
        (None, Mode.TRAIN, COLOCATED, "F0@2 F1@2 F2@2 F3@2 F4@2 F5@2 F6@2 F7@2 F0@0"),
        (2, Mode.FORWARD, COLOCATED, "F0@2 F1@2 F2@2 F3@2 F0@0 -"),
        (2, Mode.TRAIN, TaskGraph.chain(2, chunks=3), "F0@0 F1@0 F2@0 F3@0 -"),
        (2, Mode.TRAIN, TaskGraph(TablePlacement((0, 0, 1)), ((0, 2), (1, 2))), "F0@1 F1@1 F2@1 F0@0 -"),
    ],
    ids=["no limit", "forward only", "a chain", "no reader on the stage"],
)
def test_elsewhere_encoders_run_as_far_as_memory_lets_them(
    limit: int | None, mode: Mode, graph: TaskGraph, decisions: str
) -> None:
    script = first_stage(limit=limit, mode=mode, graph=graph)
    assert script.decisions(len(decisions.split())) == decisions
    assert not script.core.hint.may_wait


def test_whole_microbatches_are_counted_with_what_they_skip() -> None:
    """Where one of eight has an image six slots hold nearly three instead of two, and two may be ahead."""
    assert first_stage(limit=2, skipped=[IMAGE] * 7 + [frozenset()]).decisions(4) == "F0@2 F1@2 F7@0 -"


def test_a_microbatch_that_skips_all_that_reads_an_encoder_here_is_not_ahead() -> None:
    """Two may be ahead: 2 and 3 are, and 0 and 1, which have sound only, are not."""
    skipped = [frozenset({4, 5}) | IMAGE] * 2 + [frozenset[int]()] * 6
    assert first_stage(limit=2, skipped=skipped).decisions(7) == "F0@2 F1@2 F2@2 F3@2 F2@0 F3@0 -"


def test_under_a_limit_on_bytes_a_whole_microbatch_is_what_its_forwards_have_left() -> None:
    """Three microbatches of 10 bytes a chunk fit, so two may be ahead."""
    script = first_stage(limit=Limit(bytes=90))
    script.ran("F0@2", held=10)
    assert script.core.decide() == Run(T("F1@2"))
    script.ran("F1@2", "F0@0", "F1@0", held=10)
    assert "F2@2" in script.ready.split()
    assert script.decisions(1) == "-"


# No step hangs by it.


def test_the_lowest_microbatch_is_never_kept_waiting() -> None:
    """Two may be ahead on the last stage. Later microbatches come first."""
    script = Script(COLOCATED, 1, 8, hint=BackwardForward(), limit=2)
    script.arrived("F1@0", "F2@0", "F3@0")
    assert script.decisions(3) == "F1@1 F2@1 -"
    assert script.ready == "F3@1"
    script.arrived("F0@0")
    assert script.decisions(2) == "F0@1 -"


def test_on_a_plain_stage_forwards_wait_only_while_a_deeper_chunk_holds_a_slot() -> None:
    """A tree: 0 feeds 1 and 3, 1 feeds 2, and 2 feeds 4. Two microbatches may be ahead on 0, on the stage of 2."""
    tree = TaskGraph(TablePlacement((0, 1, 0, 1, 1)), ((0, 1), (0, 3), (1, 2), (2, 4)))
    script = first_stage(limit=3, graph=tree)
    assert script.decisions(6) == "F0@0 F1@0 F2@0 F3@0 F4@0 -"  # the staircase keeps the last slot for chunk 2
    script = first_stage(limit=3, graph=tree)
    script.ran("F0@0")
    script.arrived("F0@1")
    assert script.decisions(4) == "F0@2 F1@0 F2@0 -"
    assert script.ready == "F3@0 F4@0 F5@0 F6@0 F7@0"


BRANCH = TaskGraph(TablePlacement((0, 1, 2, 3)), ((0, 1), (1, 3), (2, 3)))
DIAMOND = TaskGraph(TablePlacement((0, 1, 2, 3)), ((0, 1), (0, 2), (1, 3), (2, 3)))
UNEQUAL = TaskGraph(TablePlacement((0, 0, 1, 0, 1, 2)), ((0, 3), (1, 3), (2, 3), (3, 4), (4, 5)), (True, False) * 3)
SPLIT = TaskGraph(COLOCATED.placement, COLOCATED.edges, (True,) * 6)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(
    ("graph", "optional"),
    [
        (BRANCH, [{0, 1}, {2}]),
        (DIAMOND, [{1}, {2}]),
        (COLOCATED, [IMAGE, AUDIO]),
        (SPLIT, [IMAGE, AUDIO]),
        (UNEQUAL, [{0}, {1}, {2}]),
    ],
    ids=["branch", "diamond", "co-located", "co-located, split", "unequal chunks"],
)
def test_every_hint_ends_on_graphs_from_the_smallest_legal_limit(
    name: str, graph: TaskGraph, optional: Sequence[set[int]]
) -> None:
    stages = range(graph.placement.stages)
    for seed in range(12):
        rng = random.Random(seed)
        skips = [frozenset[int]().union(*(part for part in optional if rng.random() < 0.4)) for _ in range(6)]
        more = (0, 0, 1, 3)[seed % 4]
        limits = [SlotLimit(chunk_tasks=graph.placement.chunks_of(stage) + more) for stage in stages]
        network = RandomRun(
            graph,
            [create_hint(name) for _ in stages],
            limits,
            seed=seed,
            depth=1 + seed % 2,
            visits=[Visits(6, tuple(skips))] if seed % 3 else [],
        )
        network.run([(Mode.TRAIN, 6)])


def random_tree(rng: random.Random) -> TaskGraph:
    """Up to eight virtual stages on two stages; each but the first reads one just before it, so nothing is joined."""
    count = rng.randint(4, 8)
    edges = tuple((rng.randrange(max(0, v - 3), v), v) for v in range(1, count))
    return TaskGraph(TablePlacement((0, 1, *(rng.randrange(2) for _ in range(count - 2)))), edges)


def run_tree(seed: int) -> None:
    """A step of six microbatches that skip parts of a tree, with hints that hold back what they may."""
    rng = random.Random(seed)
    graph = random_tree(rng)
    count = graph.placement.num_virtual_stages
    limits = [SlotLimit(chunk_tasks=graph.placement.chunks_of(stage) + rng.randrange(2)) for stage in range(2)]
    hints = [holding_back(rng.choice([BackwardForward, ForwardPriority])()) for _ in limits]
    RandomRun(graph, hints, limits, seed=seed, visits=[random_visits(count, 6, rng, 0.3)]).run([(Mode.TRAIN, 6)])


def test_on_trees_the_staircase_lets_every_step_end_although_hints_hold_back_what_they_may() -> None:
    """Nine of these hang if plain stages keep all but the lowest microbatch waiting, whatever deeper chunks hold."""
    for seed in range(300):
        run_tree(seed)
