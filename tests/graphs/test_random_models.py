"""Random graphs of parts on random stages, with random visits, hints and limits, give the gradients of one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graphs.graph_models import WIDTH, Block, Model, Modules, loss_fn, tensors

import rrfp
from rrfp.errors import ConfigError
from rrfp.model.model_graph import ModelGraph
from rrfp.testing.reference import reference

HINTS = ["bf", "fb", "b-priority", "f-priority", "bfw", "slot-aware", "slot-aware-pyramid", "bfw-pyramid"]


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def random_graph(rng: random.Random) -> rrfp.Graph:
    """Up to five parts of up to three modules on up to four stages; mostly the last reads all that none other does."""
    stages = rng.randint(1, 4)
    graph = rrfp.Graph()
    count, several_losses = rng.randint(1, 5), rng.random() < 0.3
    left = list(range(stages))
    rng.shuffle(left)
    for number in range(count):
        is_last = number == count - 1
        before = list(graph.parts.values())
        sources = [part for part in before if rng.random() < 0.4]
        if is_last and not several_losses:
            read = {source for part in before for source in part.sources}
            sources = [part for part in before if part not in read or part in sources]
        places = [left.pop() if left else rng.randrange(stages) for _ in range(rng.randint(1, 3))]
        if is_last:
            places += left
        reads = {f"r{i}": part for i, part in enumerate(sources) if rng.random() < 0.7}
        reads_all = {f"r{i}": part for i, part in enumerate(sources) if f"r{i}" not in reads}
        optional = (several_losses or not is_last) and rng.random() < 0.5
        graph.part(f"p{number}", stages=places, reads=reads, reads_all=reads_all, optional=optional)
    return graph


def random_visits(rng: random.Random, graph: rrfp.Graph, count: int) -> dict[str, list[bool]] | None:
    """Visits that leave no part without a reader, if a few draws find any."""
    compiled = ModelGraph.of(graph)
    for _ in range(20):
        visits = {name: [rng.random() < 0.6 for _ in range(count)] for name in compiled.optional}
        try:
            compiled.visits_of(visits, count)
        except ConfigError:
            continue
        return visits
    return None


def random_model(seed: int) -> tuple[Model, dict[str, Any]] | None:
    """A model, and options of its pipeline; None where the graph drawn makes no sense."""
    rng = random.Random(seed)
    graph, count = random_graph(rng), rng.randint(1, 6)
    try:
        sinks = ModelGraph.of(graph).sinks
    except ConfigError:
        return None
    torch.manual_seed(seed)
    modules: Modules = {name: [Block() for _ in part.stages] for name, part in graph.parts.items()}
    rows = [rng.randint(1, 4) for _ in range(count)]
    inputs = {
        name: tensors(WIDTH, rows) for name, part in graph.parts.items() if not part.sources or rng.random() < 0.5
    }
    options = {
        "hint": rng.choice(HINTS),
        "limit": rng.choice([1, 1, 2, 3, "2n", rrfp.Limit(bytes=rng.choice([1, 500, 3000]))]),
        "split": rng.random() < 0.5,
        "deterministic": rng.random() < 0.5,
    }
    targets: Any = {name: tensors(WIDTH, rows) for name in sinks}
    losses: Any = dict.fromkeys(sinks, loss_fn)
    if len(sinks) == 1:
        targets, losses = targets[sinks[0]], loss_fn
    return Model(graph, modules, inputs, random_visits(rng, graph, count), targets, losses), options


def check(seed: int) -> bool:
    """Compare one random model; returns whether there was one."""
    drawn = random_model(seed)
    if drawn is None:
        return False
    own, options = drawn
    alone = own.copied()
    wanted = reference(
        alone.modules, alone.inputs, alone.targets, loss_fn=alone.loss_fn, graph=alone.graph, visits=alone.visits
    )
    with rrfp.local(own.by_stage(), graph=own.graph, loss_fn=own.loss_fn, **options).blocking() as pipe:
        result = pipe.step(own.inputs, own.targets, visits=own.visits)
    assert result.losses == wanted.losses, (seed, str(own.graph), options)
    others = alone.gradients()
    for name, gradient in own.gradients().items():
        other = others[name]
        where = (seed, name, str(own.graph), options)
        assert (gradient is None) == (other is None), where
        if gradient is None or other is None:
            continue
        is_same = gradient.equal(other) if options["deterministic"] else torch.allclose(gradient, other, 0, 1e-12)
        assert is_same, where
    return True


def test_random_models_give_the_gradients_of_one_process() -> None:
    compared = sum(map(check, range(40)))
    assert compared > 20


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(10))
def test_many_random_models_give_the_gradients_of_one_process(block: int) -> None:
    compared = sum(map(check, range(1000 + 200 * block, 1200 + 200 * block)))
    assert compared > 100
