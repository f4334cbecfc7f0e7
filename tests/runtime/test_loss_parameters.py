"""A loss that is a module: its parameters and buffers belong to the last virtual stage."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from deterministic_runs import STAGES, AnyReady, assert_bitwise, model, train_in_a_pipeline, train_in_one_process
from runtime.ranks import BATCH, ThreadedRanks
from runtime.toys import TOLERANCE, WIDTH, largest_difference, same_bits, stages
from torch import Tensor, nn

import rrfp
from rrfp.compute.split import backward as split_backward
from rrfp.errors import ConfigError
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.testing.reference import reference


@pytest.fixture(autouse=True)
def everything_is_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of these sizes would not be."""
    monkeypatch.setattr(split_backward, "MIN_FLOPS", 0.0)


class Learned(nn.Module):
    """A head and a temperature, which are learned with the model, and dropout."""

    def __init__(self, width: int = WIDTH, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(9)
            self.head = nn.Linear(width, width, dtype=dtype)
        self.temperature = nn.Parameter(torch.full((), 1.5, dtype=dtype))
        self.drop = nn.Dropout(0.1)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.drop(self.head(output)) / self.temperature, target)


def expected_of(modules: list[nn.Module], loss_fn: Any, **options: Any) -> float | None:
    return reference(modules, BATCH.inputs, BATCH.targets, loss_fn=loss_fn, **options).loss


# Gradients.


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_gradients_norm_and_clipping_are_those_of_one_process(split: bool, deterministic: bool) -> None:
    """Over two steps into the same gradients."""
    ours, theirs = [*stages(3), Learned()], [*stages(3), Learned()]
    with rrfp.local(ours[:-1], loss_fn=ours[-1], split=split, deterministic=deterministic).blocking() as pipe:
        for number in range(2):
            result = pipe.step(BATCH.inputs, BATCH.targets)
            assert result.loss == pytest.approx(expected_of(theirs[:-1], theirs[-1], step=number), rel=TOLERANCE)
        assert not deterministic or same_bits(ours, theirs)
        norm = pipe.clip_grad_norm_(0.01)
    everything = [parameter for module in theirs for parameter in module.parameters()]
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(everything, 0.01)), rel=1e-12)
    assert largest_difference(ours, theirs) < TOLERANCE


def test_ranks_that_do_not_compute_the_loss_ignore_it() -> None:
    """Every rank builds one."""
    modules, losses = stages(3), [Learned() for _ in range(3)]
    theirs, loss = stages(3), Learned()

    def body(stage: int, pipe: BlockingPipeline) -> float:
        pipe.step(BATCH.inputs, BATCH.targets)
        return pipe.clip_grad_norm_(math.inf)

    own = {stage: {"loss_fn": each} for stage, each in enumerate(losses)}
    norms = [outcome.value for outcome in ThreadedRanks(modules, body, own).join()]
    expected_of(theirs, loss)
    everything = [p.grad for module in (*theirs, loss) for p in module.parameters() if p.grad is not None]
    assert norms == [pytest.approx(float(nn.utils.get_total_norm(everything)), rel=1e-12)] * 3
    assert largest_difference([losses[2]], [loss]) < TOLERANCE
    assert all(parameter.grad is None for unused in losses[:2] for parameter in unused.parameters())


def test_a_frozen_model_with_a_loss_that_learns_trains() -> None:
    modules, loss = stages(2), Learned()
    for module in modules:
        module.requires_grad_(False)
    with rrfp.local(modules, loss_fn=loss, split=True).blocking() as pipe:
        pipe.step(BATCH.inputs, BATCH.targets)
    assert loss.temperature.grad is not None


def test_a_loss_that_does_not_depend_on_what_it_learns_is_refused() -> None:
    class Detached(Learned):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return super().forward(output, target).detach()

    modules = [stages(1)[0].requires_grad_(False)]
    with (
        pytest.raises(rrfp.PipelineAborted, match="the loss of microbatch 0 does not require grad"),
        rrfp.local(modules, loss_fn=Detached()).blocking() as pipe,
    ):
        pipe.step(BATCH.inputs, BATCH.targets)


@pytest.mark.allow_blocking("everything runs on the loop, in virtual time")
@pytest.mark.parametrize(
    "policy", [{"hint": "bf"}, {"hint": "bfw", "split": True}, {"hint": AnyReady, "split": True}], ids=str
)
def test_five_steps_are_bitwise_those_of_one_process(policy: dict[str, Any]) -> None:
    expected, loss = model(STAGES), Learned(16, torch.float32)
    losses = train_in_one_process(expected, loss)
    modules, own = model(STAGES), Learned(16, torch.float32)
    assert train_in_a_pipeline(modules, "looped", 3, loss_fn=own, **policy) == losses
    assert_bitwise([*modules, own], [*expected, loss])


# Parameters that the loss shares with the model.


class Shares(nn.Module):
    """Uses the weight of a layer of the model."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layer(output), target)


def first_layer(module: nn.Module) -> nn.Linear:
    (layer, *_) = module.children()
    assert isinstance(layer, nn.Linear)
    return layer


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("owner", [0, 1, 2])
def test_an_object_of_any_stage_and_the_loss_counts_once(owner: int, split: bool) -> None:
    ours, theirs = stages(3), stages(3)
    loss, expected = Shares(first_layer(ours[owner])), Shares(first_layer(theirs[owner]))
    with rrfp.local(ours, loss_fn=loss, split=split, deterministic=True).blocking() as pipe:
        for number in range(2):
            pipe.step(BATCH.inputs, BATCH.targets)
            expected_of(theirs, expected, step=number)
        norm = pipe.clip_grad_norm_(math.inf)
    assert same_bits(ours, theirs)
    found = [parameter.grad for module in theirs for parameter in module.parameters() if parameter.grad is not None]
    assert norm == pytest.approx(float(nn.utils.get_total_norm(found)), rel=1e-12)


def test_an_object_of_two_stages_and_the_loss_has_one_copy_on_the_last() -> None:
    def build() -> tuple[list[nn.Module], nn.Module]:
        modules = stages(2)
        layer = first_layer(modules[0])
        modules[1] = nn.Sequential(modules[1], layer)
        return modules, Shares(layer)

    (ours, loss), (theirs, expected) = build(), build()
    with rrfp.local(ours, loss_fn=loss, deterministic=True).blocking() as pipe:
        pipe.step(BATCH.inputs, BATCH.targets)
    expected_of(theirs, expected)
    assert same_bits(ours, theirs)


def test_ties_may_name_a_parameter_of_the_loss() -> None:
    """A copy of it on another rank."""
    modules, theirs = stages(2), stages(2)
    loss = Shares(copy.deepcopy(first_layer(modules[0])))
    expected = Shares(first_layer(theirs[0]))

    def body(stage: int, pipe: BlockingPipeline) -> float:
        pipe.step(BATCH.inputs, BATCH.targets)
        return pipe.clip_grad_norm_(math.inf)

    copies = [first_layer(modules[0]), loss.layer]
    own: Any = {
        stage: {"ties": {"weight": layer.weight, "bias": layer.bias}, "loss_fn": loss}
        for stage, layer in enumerate(copies)
    }
    outcomes = ThreadedRanks(modules, body, own, deterministic=True).join()
    assert [outcome.error for outcome in outcomes] == [None, None]
    expected_of(theirs, expected)
    assert same_bits([*modules, loss], [*theirs, expected])
    found = [parameter.grad for module in theirs for parameter in module.parameters() if parameter.grad is not None]
    norm = pytest.approx(float(nn.utils.get_total_norm(found)), rel=1e-12)
    assert [outcome.value for outcome in outcomes] == [norm] * 2


def test_on_another_rank_than_the_last_ties_cannot_name_it() -> None:
    loss = Learned()
    with pytest.raises(ConfigError, match=r"ties\['t'\] is a tensor of shape .* that no module of this rank has"):
        rrfp.Pipeline(stages(1)[0], topology=rrfp.Topology(0, 2), loss_fn=loss, ties={"t": loss.temperature})


# The rest of what belongs to a virtual stage.


def test_its_parameters_and_buffers_are_no_activations() -> None:
    class Wide(nn.Module):
        bias: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1000, WIDTH, dtype=torch.float64))
            self.register_buffer("bias", torch.ones(1000, WIDTH, dtype=torch.float64))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (output.mean() * self.weight * self.bias).mean() + target.mean()

    def held(loss_fn: Any) -> int:
        with rrfp.local(stages(1, dropout=0.0), loss_fn=loss_fn).blocking() as pipe:
            return pipe.step(BATCH.inputs, BATCH.targets).peak_bytes[0]

    size = 1000 * WIDTH * 8
    assert held(wide := Wide()) < size
    assert held(wide.forward) >= 2 * size, "autograd saves both, and here nobody knows whose they are"


def test_errors_name_its_parameters() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.LazyLinear(4)

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return nn.functional.mse_loss(self.head(output), target)

    with pytest.raises(ConfigError, match=r"^'loss_fn\.head\.weight' of Sequential on virtual stage 1 is lazy"):
        rrfp.local(stages(2), loss_fn=Lazy())


class Normed(nn.Module):
    """BatchNorm in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.norm(output.transpose(1, 2)).transpose(1, 2), target)


@pytest.mark.allow_blocking("everything runs on the loop, in virtual time")
def test_its_running_statistics_are_those_of_microbatches_in_order() -> None:
    expected, loss = model(STAGES), Normed()
    losses = train_in_one_process(expected, loss)
    for seed in range(3):
        modules, own = model(STAGES), Normed()
        assert train_in_a_pipeline(modules, "looped", seed, hint=AnyReady, split=True, loss_fn=own) == losses
        assert_bitwise([*modules, own], [*expected, loss])
        assert all(torch.equal(a, b) for a, b in zip(own.buffers(), loss.buffers(), strict=True))


@pytest.mark.parametrize(
    "wrap", [lambda loss: loss.forward, lambda loss: partial(loss), lambda loss: lambda *a: loss(*a)]
)
def test_a_function_that_uses_a_module_stays_the_callers_own(wrap: Any) -> None:
    """Its parameters get their gradients, and nobody sums, clips or counts them."""
    modules, loss = stages(2), Learned()
    with rrfp.local(modules, loss_fn=wrap(loss)).blocking() as pipe:
        pipe.step(BATCH.inputs, BATCH.targets)
        norm = pipe.clip_grad_norm_(math.inf)
    assert loss.temperature.grad is not None
    found = [parameter.grad for module in modules for parameter in module.parameters() if parameter.grad is not None]
    assert norm == pytest.approx(float(nn.utils.get_total_norm(found)), rel=1e-12)
