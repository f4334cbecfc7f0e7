"""Several parts that no other reads, each with a loss of its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs.graph_models import MICROBATCHES, Block, Model, blocks, loss_fn, model, tensors
from torch import Tensor, nn

import rrfp
from rrfp.errors import ConfigError
from rrfp.testing.reference import ReferenceResult, reference

PARTS = ("tags", "caption", "order")
VISITS = {"tags": [True, False, True, False], "order": [False, False, True, True]}
WEIGHTS = [1.0, 0.0, 2.5, 3.0]


@pytest.fixture
def own() -> Model:
    return model("several_losses")


def entered(own: Model, **options: Any) -> Any:
    return rrfp.local(own.by_stage(), **{"graph": own.graph, "loss_fn": own.loss_fn, **options}).blocking()


def alone_step(alone: Model, losses: Any, weights: Any = None) -> ReferenceResult:
    """The step in one process."""
    batch = (alone.modules, alone.inputs, alone.targets)
    return reference(*batch, loss_fn=losses, graph=alone.graph, visits=VISITS, weights=weights)


def test_the_loss_is_the_sum_and_a_microbatch_that_skips_a_part_adds_nothing_to_it(own: Model) -> None:
    alone = own.copied()
    wanted = alone_step(alone, alone.loss_fn, WEIGHTS)
    with entered(own) as pipe:
        result = pipe.step(own.inputs, own.targets, visits=VISITS, weights=WEIGHTS)
    assert tuple(result.part_losses) == PARTS
    assert result.part_losses == pytest.approx(dict(wanted.part_losses))
    assert result.loss == pytest.approx(sum(result.part_losses.values()))
    assert result.losses == pytest.approx(wanted.losses)
    weighted = [weight * loss for weight, loss in zip(WEIGHTS, result.losses, strict=True)]
    assert result.loss == pytest.approx(sum(weighted) / sum(WEIGHTS))


def test_a_part_that_no_microbatch_visits_has_no_loss(own: Model) -> None:
    with entered(own) as pipe:
        result = pipe.step(own.inputs, own.targets, visits={"tags": [False] * MICROBATCHES, "order": VISITS["order"]})
    assert tuple(result.part_losses) == ("caption", "order")
    assert all(each.grad is None for module in own.modules["tags"] for each in module.parameters())


def test_losses_with_parameters_are_trained(own: Model) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return loss_fn(output * self.scale, target)

    losses, others = ({name: Scaled() for name in PARTS} for _ in range(2))
    alone = own.copied()
    alone_step(alone, others)
    with entered(own, loss_fn=losses, deterministic=True) as pipe:
        pipe.step(own.inputs, own.targets, visits=VISITS)
    for name in PARTS:
        gradient, other = losses[name].scale.grad, others[name].scale.grad
        assert gradient is not None
        assert other is not None
        assert gradient.equal(other)


def test_an_evaluation_computes_the_losses_of_the_parts_with_targets(own: Model) -> None:
    with entered(own) as pipe:
        result = pipe.evaluate(own.inputs, {"tags": own.targets["tags"]}, visits=VISITS)
        nothing = pipe.evaluate(own.inputs, visits=VISITS)
    assert tuple(result.part_losses) == ("tags",)
    assert [loss == 0.0 for loss in result.losses] == [not visit for visit in VISITS["tags"]]
    assert nothing.loss is None
    assert (nothing.losses, nothing.part_losses) == ((), {})
    assert [tuple(nothing.outputs[m]) for m in range(MICROBATCHES)] == [
        tuple(name for name in PARTS if VISITS.get(name, [True] * MICROBATCHES)[m]) for m in range(MICROBATCHES)
    ]
    assert [tuple(result.outputs[m]) for m in sorted(result.outputs)] == [
        tuple(name for name in ("caption", "order") if VISITS.get(name, [True] * MICROBATCHES)[m])
        for m in range(MICROBATCHES)
    ]


def test_outputs_without_losses_need_no_loss_fn(own: Model) -> None:
    with entered(own, loss_fn=None) as pipe:
        result = pipe.evaluate(own.inputs)
        assert all(tuple(output) == PARTS for output in result.outputs.values())
        with pytest.raises(ConfigError, match="loss_fn is missing for part 'tags': a training step needs it"):
            pipe.step(own.inputs, own.targets)


def test_a_loss_that_is_not_finite_is_logged_with_its_part(own: Model, caplog: pytest.LogCaptureFixture) -> None:
    own.targets["order"][3].fill_(math.nan)
    with caplog.at_level(logging.WARNING), entered(own) as pipe:
        pipe.step(own.inputs, own.targets, visits=VISITS)
    assert "the loss of microbatch 3 of part 'order' is nan" in caplog.text


YES = [True] * MICROBATCHES
REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda t: [*t["tags"]], "targets is of type list, must be a dict with a list for each part with a loss, of: tags"),
    (lambda t: {**t, "lm": t["tags"]}, "targets names 'lm', must name parts with a loss: tags, caption, order"),
    (lambda t: {"tags": t["tags"]}, r"targets\['caption'\] is missing, must be a list of 4 on the rank of the part's"),
    (lambda t: {**t, "order": t["order"][:3]}, r"the number of microbatches differs .*targets\['order'\]: 3"),
    (lambda t: {**t, "order": 3}, r"targets\['order'\] is of type int, must be a list with one entry a microbatch"),
    (lambda t: None, r"targets\['tags'\] is missing"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_targets_that_do_not_fit_are_refused(own: Model, change: Callable[[Any], Any], message: str) -> None:
    with entered(own) as pipe:
        with pytest.raises(ConfigError, match=message):
            pipe.step(own.inputs, change(own.targets))
        assert pipe.step(own.inputs, own.targets).loss is not None


LOSSES: list[tuple[Any, str]] = [
    (loss_fn, "no part reads 'tags' and 'caption' and 'order', and loss_fn is one function: must be a dict"),
    ({"tags": loss_fn}, "loss_fn names 'tags', must have a function for each part that no other reads: 'tags' and"),
    (dict.fromkeys((*PARTS, "lm"), loss_fn), "loss_fn names .*'lm', must have a function for each part"),
    ({**dict.fromkeys(PARTS, loss_fn), "tags": 3}, "loss_fn is .* must be .*a dict \\{part: function\\}"),
]


@pytest.mark.parametrize(("losses", "message"), LOSSES, ids=[message for _, message in LOSSES])
def test_losses_that_do_not_fit_the_graph_are_refused(own: Model, losses: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        entered(own, loss_fn=losses)


def test_a_dict_is_refused_where_one_part_has_the_loss() -> None:
    one = model("diamond")
    with pytest.raises(ConfigError, match="loss_fn is a dict, must be a function: only part 'end' has a loss"):
        rrfp.local(one.by_stage(), graph=one.graph, loss_fn={"end": loss_fn})
    with pytest.raises(ConfigError, match="loss_fn is a dict, must be a function: without graph there are no parts"):
        rrfp.local([Block()], loss_fn={"end": loss_fn})


def test_a_microbatch_must_visit_a_part_with_a_loss() -> None:
    graph = rrfp.Graph()
    encoder = graph.part("encoder", stages=[0])
    for name in ("left", "right"):
        graph.part(name, stages=[1], reads={"x": encoder}, optional=True)
    graph.part("other", stages=[0], optional=True)
    modules: Any = [{"encoder": blocks(1), "other": blocks(1)}, {"left": blocks(1), "right": blocks(1)}]
    losses = dict.fromkeys(("left", "right", "other"), loss_fn)
    targets = {name: tensors(4) for name in losses}
    with rrfp.local(modules, graph=graph, loss_fn=losses).blocking() as pipe:
        inputs = {"encoder": tensors(4), "other": tensors(4)}
        no_loss: Any = {name: [False, *YES[1:]] for name in losses}
        with pytest.raises(ConfigError, match="visits: microbatch 0 visits 'encoder' and skips all parts that read it"):
            pipe.step(inputs, targets, visits=no_loss)
        result = pipe.step(inputs, targets, visits={**no_loss, "left": YES})
        assert len(result.losses) == MICROBATCHES


def test_a_microbatch_that_skips_every_loss_is_refused() -> None:
    graph = rrfp.Graph()
    for stage, name in enumerate(("left", "right")):
        graph.part(name, stages=[stage], optional=True)
    modules: Any = [{"left": blocks(1)}, {"right": blocks(1)}]
    losses = dict.fromkeys(("left", "right"), loss_fn)
    data = {name: tensors(4) for name in losses}
    with rrfp.local(modules, graph=graph, loss_fn=losses).blocking() as pipe:
        with pytest.raises(ConfigError, match="visits: microbatch 2 skips all parts with a loss: must visit one of: "):
            pipe.step(data, data, visits={name: [True, True, False, True] for name in losses})
        assert pipe.step(data, data, visits={"left": [True, False, False, True]}).loss is not None
