"""The arguments of a step by part: what is missing, unknown or of another length is named before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from graphs.graph_models import MICROBATCHES, WIDTH, Model, loss_fn, model, tensors
from torch import Tensor, nn

import rrfp
from rrfp.errors import ConfigError, PipelineAborted


@pytest.fixture
def own() -> Model:
    return model("two_sources")


@pytest.fixture
def pipe(own: Model) -> Iterator[Any]:
    with rrfp.local(own.by_stage(), graph=own.graph, loss_fn=loss_fn, hint="bf").blocking() as entered:
        yield entered


def batch(own: Model, **changes: Any) -> dict[str, Any]:
    return {"inputs": dict(own.inputs), "targets": own.targets, **changes}


YES = [True] * MICROBATCHES
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"inputs": [1] * 4}, "inputs is of type list, must be a dict with a list for each part that has any"),
    ({"inputs": {"visoin": [1] * 4}}, "inputs names the part 'visoin', must be one of: vision, audio, lm"),
    ({"inputs": {"lm": [1] * 4}}, r"inputs\['vision'\] is missing, must be a list of 4"),
    ({"kwargs": {"visoin": [{}] * 4}}, "kwargs names the part 'visoin', must be one of: vision, audio, lm"),
    ({"kwargs": {"lm": [{}] * 3}}, r"the number of microbatches differs .*kwargs\['lm'\]: 3"),
    ({"kwargs": {"lm": [1] * 4}}, r"kwargs\['lm'\]\[0\] is of type int, must be a dict"),
    ({"visits": {"lm": YES}}, "visits names 'lm', must name optional parts: vision, audio"),
    ({"visits": {"vision": YES[:3]}}, r"differs between arguments .*visits\['vision'\]: 3"),
    ({"visits": {"vision": [1] * 4}}, r"visits\['vision'\] is \[1, 1, 1, 1\], must be a list of 4 booleans"),
    ({"visits": {"vision": True}}, r"visits\['vision'\] is of type bool, must be a list"),
    ({"visits": [YES]}, "visits is of type list, must be a dict"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_wrong_argument_is_named_and_the_next_step_runs(own: Model, pipe: Any, changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipe.step(**batch(own, **changes))
    assert pipe.step(**batch(own)).loss is not None


def test_inputs_of_one_part_of_another_length_are_named(own: Model, pipe: Any) -> None:
    inputs = {**own.inputs, "audio": tensors(WIDTH)[:3]}
    with pytest.raises(ConfigError, match=r"differs between arguments \(.*inputs\['audio'\]: 3"):
        pipe.step(**batch(own, inputs=inputs))


@pytest.mark.parametrize("make", [np.array, torch.tensor, list, tuple])
def test_visits_are_booleans_of_any_array(own: Model, pipe: Any, make: Any) -> None:
    """A step whose visits come as an array is that whose visits come as a list."""
    assert own.visits is not None
    wanted = pipe.evaluate(**batch(own), visits=own.visits).losses
    assert wanted != pipe.evaluate(**batch(own)).losses
    assert pipe.evaluate(**batch(own), visits={name: make(own.visits[name]) for name in own.visits}).losses == wanted


def test_inputs_of_skipped_microbatches_are_not_read(own: Model, pipe: Any) -> None:
    assert own.visits is not None
    inputs = {
        name: [x if name == "lm" or own.visits[name][m] else None for m, x in enumerate(values)]
        for name, values in own.inputs.items()
    }
    wanted = pipe.evaluate(**batch(own), visits=own.visits).losses
    assert pipe.evaluate(**batch(own, inputs=inputs), visits=own.visits).losses == wanted


def test_a_part_that_no_microbatch_visits_needs_no_inputs(own: Model, pipe: Any) -> None:
    visits = {**(own.visits or {}), "vision": [False] * MICROBATCHES}
    wanted = pipe.evaluate(**batch(own), visits=visits).losses
    inputs = {name: values for name, values in own.inputs.items() if name != "vision"}
    assert pipe.evaluate(**batch(own, inputs=inputs), visits=visits).losses == wanted
    assert pipe.step(**batch(own, inputs=inputs), visits=visits).losses == wanted


def test_visits_need_a_graph() -> None:
    with rrfp.local([nn.Linear(2, 2)], loss_fn=loss_fn).blocking() as pipe:
        x = [torch.randn(1, 2)]
        with pytest.raises(ConfigError, match="visits is given, must be None: the pipeline has no graph"):
            pipe.step(x, x, visits={"vision": [True]})


def test_a_part_whose_readers_are_all_skipped_must_be_skipped_too() -> None:
    own = model("chained_encoders")
    with rrfp.local(own.by_stage(), graph=own.graph, loss_fn=loss_fn, hint="bf").blocking() as pipe:
        visits = {"projector": [True, False, True, True]}
        with pytest.raises(ConfigError, match="microbatch 1 visits 'tower' and skips all parts that read it"):
            pipe.step(own.inputs, own.targets, visits=visits)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, *, factor: float = 1.0, **read: Tensor) -> Tensor:
        return sum(read.values(), x * factor * self.weight)


def test_keywords_are_given_by_part_by_stage_or_to_all() -> None:
    graph = rrfp.Graph()
    one = graph.part("one", stages=[0])
    graph.part("two", stages=[0, 1], reads={"other": one})
    modules: list[Any] = [{"one": Scaled(), "two": Scaled()}, {"two": Scaled()}]
    x = [torch.ones(1)]
    with rrfp.local(modules, graph=graph, hint="bf").blocking() as pipe:

        def output(kwargs: Any) -> float:
            return float(pipe.evaluate({"one": x, "two": x}, kwargs=kwargs).outputs[0])

        assert output(None) == 1 + 1
        assert output([{"factor": 2.0}]) == (2 + 2) * 2
        assert output({"two": [{"factor": 3.0}]}) == (3 + 1) * 3
        assert output({"one": [{"factor": 3.0}]}) == 1 + 3
        assert output({1: [{"factor": 5.0}]}) == (1 + 1) * 5


def test_a_key_that_an_output_lacks_is_named() -> None:
    graph = rrfp.Graph()
    one = graph.part("one", stages=[0])
    graph.part("two", stages=[1], reads={"other": one["skip"]})
    x = [torch.ones(1)]
    pipeline = rrfp.local([{"one": Scaled()}, {"two": Scaled()}], graph=graph, hint="bf")
    wanted = "output is no dict, must be a dict with the key 'skip'"
    with pytest.raises(PipelineAborted, match=wanted), pipeline.blocking() as pipe:
        pipe.evaluate({"one": x, "two": x})
