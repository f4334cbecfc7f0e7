"""What a step takes beside inputs and targets, how a whole batch is refused, and what an evaluation gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime.ranks import ThreadedRanks
from runtime.toys import TOLERANCE, WIDTH, data, loss_fn, stages
from torch import Tensor, nn

import rrfp
from rrfp.errors import ConfigError, PipelineAborted


@pytest.mark.parametrize("return_outputs", [None, True, False])
def test_evaluating_gives_losses_and_outputs_as_asked_for(return_outputs: bool | None) -> None:
    modules, batch = stages(2, dropout=0.0), data(3)
    with rrfp.local(modules, loss_fn=loss_fn).blocking() as pipe:
        result = pipe.evaluate(batch.inputs, batch.targets, return_outputs=return_outputs)
        unscored = pipe.evaluate(batch.inputs, return_outputs=return_outputs)
        with pytest.raises(ConfigError, match="unknown argument 'return_outputs'"):
            pipe.step(batch.inputs, batch.targets, return_outputs=True)  # type: ignore[call-arg]
        with pytest.raises(ConfigError, match="return_outputs is 1, must be True or False, or None"):
            pipe.evaluate(batch.inputs, return_outputs=1)  # type: ignore[arg-type]
        assert pipe.step(batch.inputs, batch.targets).outputs == {}
    assert len(result.losses) == 3
    assert list(result.outputs) == ([0, 1, 2] if return_outputs else [])
    assert list(unscored.outputs) == ([] if return_outputs is False else [0, 1, 2])
    for m, output in result.outputs.items():
        assert loss_fn(output, batch.targets[m]).item() == pytest.approx(result.losses[m], rel=TOLERANCE)


def test_outputs_of_an_evaluation_have_no_history() -> None:
    class Stubborn(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            with torch.enable_grad():
                return {"y": [super().forward(x)], "x": (x,)}

    with rrfp.local([Stubborn(WIDTH, WIDTH).double()]).blocking() as pipe:
        output = pipe.evaluate(data(1).inputs).outputs[0]
    assert output["y"][0].grad_fn is None
    assert not output["y"][0].requires_grad


class Scaled(nn.Module):
    """A stage that takes a keyword that others do not."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x * scale


def test_keywords_for_one_stage() -> None:
    batch, kwargs = data(2, ragged=False), {1: [{"scale": 2.0}, {"scale": 3.0}]}
    with rrfp.local([nn.Identity(), Scaled(), nn.Identity()], loss_fn=loss_fn).blocking() as pipe:
        trained = pipe.step(batch.inputs, batch.targets, kwargs=kwargs)
        result = pipe.evaluate(batch.inputs, kwargs=kwargs)
        plain = pipe.evaluate(batch.inputs, kwargs={})
        with pytest.raises(PipelineAborted, match=r"stage 0.* unexpected keyword argument 'scale'"):
            pipe.evaluate(batch.inputs, kwargs=kwargs[1])
    assert trained.losses[1] == loss_fn(batch.inputs[1] * 3, batch.targets[1])
    assert torch.equal(result.outputs[1], batch.inputs[1] * 3)
    assert torch.equal(plain.outputs[1], batch.inputs[1])


def test_the_same_keywords_by_stage_between_ranks() -> None:
    batch, kwargs = data(2, ragged=False), {1: [{"scale": 2.0}, {"scale": 3.0}]}
    inputs = batch.inputs

    def step(stage: int, pipe: Any) -> Any:
        return pipe.evaluate(inputs if stage == 0 else None, kwargs=kwargs).outputs

    outcomes = ThreadedRanks([nn.Identity(), Scaled()], step).join()
    assert torch.equal(outcomes[1].value[1], inputs[1] * 3)


class Lazy(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part


@pytest.mark.parametrize(
    ("part", "name"), [(nn.LazyLinear(3), "part.weight"), (nn.LazyBatchNorm1d(affine=False), "part.running_mean")]
)
def test_a_lazy_module_is_refused_when_the_pipeline_is_made(part: nn.Module, name: str) -> None:
    message = f"'{name}' of Lazy on virtual stage 1 is lazy, must have a shape: run one forward"
    with pytest.raises(ConfigError, match=message):
        rrfp.local([nn.Identity(), Lazy(part)])
    with pytest.raises(ConfigError, match=message):
        rrfp.Pipeline(Lazy(part), topology=rrfp.Topology(1, 2))


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"targets": torch.zeros(3)}, "; pass microbatches=8 too, for 8, to cut a whole batch along dimension 0"),
    (
        {"weights": torch.ones(2)},
        "weights is of type Tensor, must be a list with one entry a microbatch: write weights.tolist()",
    ),
    (
        {"inputs": torch.zeros(8).numpy(), "microbatches": 2},
        "inputs is of type ndarray, must be a list with one entry a microbatch, or what can be cut: a tensor, or",
    ),
    ({"inputs": (torch.zeros(8),) * 3}, "; if inputs is a whole batch, pass microbatches=8 too"),
    ({"kwargs": {0: [{}, None]}}, "kwargs[0][1] is of type NoneType, must be a dict"),
    ({"kwargs": {2: [{}, {}]}}, "kwargs names the stage 2, must be one of: 0, 1"),
    (
        {"kwargs": {"mask": torch.zeros(2)}},
        "kwargs names the stage 'mask', must be one of: 0, 1; for all stages write a list",
    ),
    ({"kwargs": {1: [{}]}}, "(inputs: 2, targets: 2, kwargs[1]: 1)"),
    ({"kwargs": {1: {}}}, "kwargs[1] is of type dict, must be a list"),
]


@pytest.mark.parametrize(("change", "message"), BAD_ARGUMENTS, ids=lambda value: str(value)[:30])
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    batch = data(2)
    with rrfp.local(stages(2), loss_fn=loss_fn).blocking() as pipe, pytest.raises(ConfigError) as caught:
        pipe.evaluate(**{"inputs": batch.inputs, "targets": batch.targets, **change})
    assert message in str(caught.value)
