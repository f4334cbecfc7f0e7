"""Tied parameters: every copy's gradient is the sum of all, the same bits as one process's where that is promised."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from deterministic_runs import STAGES, AnyReady, train_in_a_pipeline, train_in_one_process
from runtime.tied_models import Head, expect, gap, gradients, same_bits, tied, words
from runtime.toys import TOLERANCE, placed
from torch import Tensor, nn
from transports.reordering import reordered

import rrfp
from rrfp.compute.split import backward as split_backward
from rrfp.errors import PipelineAborted
from rrfp.model.placement import Layout
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.testing.reference import reference
from rrfp.transports.inproc import InprocTransport

#: Virtual stages that share the embedding's weight, in a model of so many parts.
HEADS = {2: (1,), 3: (2,), 4: (1, 3)}


@pytest.fixture(autouse=True)
def everything_is_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of these sizes would not be."""
    monkeypatch.setattr(split_backward, "MIN_FLOPS", 0.0)


def run(modules: list[Any], ties: Any = None, **options: Any) -> BlockingPipeline:
    return rrfp.local(modules, ties=ties, loss_fn=nn.functional.mse_loss, **options).blocking()


# Equal to one process.


@pytest.mark.allow_blocking("everything runs on the loop, in virtual time")
@pytest.mark.every_other
@pytest.mark.parametrize("objects", [True, False], ids=["objects", "copies"])
@pytest.mark.parametrize(("chunks", "layout"), [(1, "looped"), (2, "looped"), (2, "v")])
@pytest.mark.parametrize(
    "policy",
    [{"hint": "bf"}, {"hint": "bfw"}, {"hint": "slot-aware-pyramid", "split": True}, {"hint": AnyReady, "limit": 1}],
    ids=lambda policy: str(policy["hint"]),
)
def test_five_steps_are_bitwise_those_of_one_process(
    policy: dict[str, Any], chunks: int, layout: Layout, objects: bool
) -> None:
    """With dropout, momentum, random task times and latencies: see `deterministic_runs`."""
    count = STAGES * chunks
    theirs, _ = tied(count, HEADS[count], objects=True, dtype=torch.float32)
    losses = train_in_one_process(theirs)
    ours, weights = tied(count, HEADS[count], objects=objects, dtype=torch.float32)
    ties = None if objects else {"embedding": weights}
    assert train_in_a_pipeline(ours, layout, 7, ties=ties, **policy) == losses
    assert same_bits(ours, theirs)
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    assert torch.equal(weights[0], next(theirs[0].parameters()))


@pytest.mark.every_other
@pytest.mark.parametrize("objects", [True, False], ids=["objects", "copies"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("stages", "chunks", "layout"), [(1, 2, "looped"), (3, 1, "looped"), (2, 2, "v")])
def test_without_determinism_only_the_last_bits_may_differ(
    stages: int, chunks: int, layout: Layout, split: bool, objects: bool
) -> None:
    """Each stage in a thread of its own, messages out of order, and two steps into the same gradients."""
    drawn, count = random.Random(4), stages * chunks
    transport = reordered(InprocTransport, drawn.randrange)
    theirs, _ = tied(count, HEADS[count], objects=True)
    ours, weights = tied(count, HEADS[count], objects=objects)
    ties = None if objects else {"embedding": weights}
    with run(placed(ours, stages, layout), ties, transport=transport, placement=layout, split=split) as pipe:
        for number in range(2):
            result = pipe.step(*words(5, number))
            assert result.loss == pytest.approx(expect(theirs, 5, number).loss, rel=TOLERANCE)
    assert gap(ours, theirs) < TOLERANCE
    assert all(torch.equal(gradient(weight), gradient(weights[0])) for weight in weights)


def gradient(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def test_a_gradient_travels_in_as_many_pieces_as_messages_must_be_small() -> None:
    """3 copies of 20 x 16 numbers of 8 bytes, in messages of 1000 bytes."""
    ours, weights = tied(3, (1, 2))
    theirs, _ = tied(3, (1, 2), objects=True)
    sizes: list[int] = []

    class Counting(InprocTransport):
        async def send(self, peer: int, message: rrfp.Message) -> None:
            if message.kind == "tie":
                sizes.append(message.num_bytes)
            await super().send(peer, message)

    drawn = random.Random(1)
    options = {"transport": reordered(Counting, drawn.randrange), "max_message_bytes": 1000, "deterministic": True}
    with run([*ours], {"embedding": weights}, **options) as pipe:
        pipe.step(*words(3))
    expect(theirs, 3, 0)
    assert same_bits(ours, theirs)
    assert max(sizes) <= 1000
    assert sum(sizes) == 4 * 20 * 16 * 8, "two copies to the first, and the sum to both"
    assert len(sizes) == 4 * 3


# Over several steps.


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("objects", [True, False], ids=["objects", "copies"])
def test_what_was_summed_before_counts_once(objects: bool, to_none: bool) -> None:
    """Three steps into the same gradients, halved by the caller in between; then from nothing again."""
    ours, weights = tied(3, (1, 2), objects=objects)
    theirs, _ = tied(3, (1, 2), objects=True)
    with run([*ours], None if objects else {"embedding": weights}, deterministic=True) as pipe:
        number = 0
        for _ in range(2):
            for _ in range(3):
                pipe.step(*words(4, number))
                expect(theirs, 4, number)
                assert same_bits(ours, theirs)
                for modules in (ours, theirs):
                    for each in dict.fromkeys(p for module in modules for p in module.parameters()):
                        gradient(each).mul_(0.5)
                number += 1
            pipe.evaluate(*words(3))
            assert same_bits(ours, theirs), "an evaluation leaves them alone"
            for module in (*ours, *theirs):
                module.zero_grad(set_to_none=to_none)


def test_a_step_that_does_not_reduce_leaves_each_copy_its_own() -> None:
    ours, weights = tied(3)
    theirs, _ = tied(3, objects=True)
    with run([*ours], {"embedding": weights}, deterministic=True) as pipe:
        for number in range(4):
            pipe.step(*words(4, number), reduce_gradients=number % 2 == 1)
            expect(theirs, 4, number)
            if number % 2 == 0:
                total = gradient(next(theirs[0].parameters()))
                first, head = map(gradient, weights)
                assert not torch.allclose(first, total)
                torch.testing.assert_close(first + head, total, rtol=TOLERANCE, atol=TOLERANCE)
            else:
                assert gap(ours, theirs) < TOLERANCE
                assert torch.equal(*map(gradient, weights))


def test_one_object_is_summed_in_every_step() -> None:
    """It has one ``.grad``, and nothing is hidden elsewhere between steps."""
    ours, _ = tied(4, (1, 3), objects=True)
    theirs, _ = tied(4, (1, 3), objects=True)
    with run(placed(ours, 2, "v"), placement="v", deterministic=True) as pipe:
        for number in range(3):
            pipe.step(*words(4, number), reduce_gradients=False)
            expect(theirs, 4, number)
            assert same_bits(ours, theirs)


class FailsBackward(nn.Module):
    """Passes its input on, and not its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        x.register_hook(self._fail)  # type: ignore[no-untyped-call]
        return x

    def _fail(self, gradient: Tensor) -> None:
        raise ValueError("enough")


def test_a_backward_that_fails_leaves_the_gradient_of_one_object_as_it_was() -> None:
    """It is on two stages, and the second fails after its head has formed a gradient."""
    (first, last), (weight, _) = tied(2, objects=True)
    weight.grad = before = torch.ones_like(weight)
    with pytest.raises(PipelineAborted, match="enough"), run([first, nn.Sequential(FailsBackward(), last)]) as pipe:
        pipe.step(*words(1))
    assert weight.grad is before
    assert torch.equal(before, torch.ones_like(weight))


# Gradients that are not there.


@pytest.mark.parametrize("used", [(True, False), (False, True), (False, False)])
def test_a_copy_that_is_not_used_gets_the_others_gradient(used: tuple[bool, bool]) -> None:
    def build(objects: bool) -> tuple[list[nn.Module], list[nn.Parameter]]:
        first = nn.Parameter(torch.arange(320.0, dtype=torch.float64).view(20, 16) / 320)
        weights = [first, first if objects else nn.Parameter(first.detach().clone())]
        linear = nn.Linear(16, 16).double()
        nn.init.eye_(linear.weight)
        nn.init.zeros_(linear.bias)
        heads = [Head(weight, is_used) for weight, is_used in zip(weights, used, strict=True)]
        return [nn.Sequential(linear, heads[0]), heads[1]], weights

    inputs, targets = [torch.ones(2, 16, dtype=torch.float64)] * 2, words(2)[1]
    targets = [target[:2] for target in targets]
    ours, weights = build(objects=False)
    theirs, _ = build(objects=True)
    with run([*ours], {"it": weights}, deterministic=True) as pipe:
        pipe.step(inputs, targets)
    reference(theirs, inputs, targets, loss_fn=nn.functional.mse_loss)
    assert same_bits(ours, theirs)
    assert (weights[0].grad is None) == (not any(used))


def test_frozen_copies_keep_what_they_have_until_they_thaw() -> None:
    ours, weights = tied(2)
    theirs, (weight, _) = tied(2, objects=True)
    with run([*ours], {"embedding": weights}, deterministic=True) as pipe:
        for number, learns in enumerate((True, False, False, True)):
            for each in (*weights, weight):
                each.requires_grad_(learns)
            pipe.step(*words(3, number))
            expect(theirs, 3, number)
            assert same_bits(ours, theirs)


def test_a_tie_that_never_learns_has_no_gradient() -> None:
    ours, weights = tied(3)
    for each in weights:
        each.requires_grad_(False)
    with run([*ours], {"embedding": weights}) as pipe:
        pipe.step(*words(3))
    assert [each.grad for each in weights] == [None, None]
    assert all(grad is not None for grad in gradients(ours[1:2]))


def test_a_copy_that_is_frozen_alone_in_midst_of_training_is_an_error_that_names_the_tie() -> None:
    ours, weights = tied(3)
    with run([*ours], {"embedding": weights}) as pipe:
        pipe.step(*words(3))
        weights[1].requires_grad_(False)
        with pytest.raises(rrfp.PipelineAborted) as caught:
            pipe.step(*words(3))
    assert caught.value.origin.cause == (
        "StageError: tie 'embedding' is frozen on virtual stage 2 only, must be on all or none"
    )


@pytest.mark.parametrize("stepped", [0, 1, 2])
def test_copies_that_drift_apart_are_named_where_they_are_compared(stepped: int) -> None:
    """As where an optimizer has one copy only. Steps that accumulate sum nothing, and compare nothing."""
    ours, weights = tied(4, (1, 3))
    optimizer = torch.optim.SGD([weights[stepped]], lr=0.1)
    with run([*ours], {"embedding": weights}, check_replicas=3) as pipe:
        for number in range(7):
            pipe.step(*words(3, number), reduce_gradients=number % 2 == 1)
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(rrfp.PipelineAborted) as caught:  # in the fourth sum
            pipe.step(*words(3))
    others = ("virtual stage 1, virtual stage 3", "virtual stage 1", "virtual stage 3")[stepped]
    assert caught.value.origin.cause == (
        f"StageError: tie 'embedding' has other values on {others} than on virtual stage 0: must be the same, as the "
        "gradients are. Does an optimizer step some copies only, or with another learning rate, or were values loaded "
        "into one of them? (check_replicas=3 compares them.)"
    )


@pytest.mark.parametrize("every", [0, 2])
def test_copies_that_stay_equal_or_are_not_compared_train_on(every: int) -> None:
    ours, weights = tied(3)
    optimizer = torch.optim.SGD(weights if every else weights[:1], lr=0.1)
    with run([*ours], {"embedding": weights}, check_replicas=every) as pipe:
        for number in range(4):
            pipe.step(*words(3, number))
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(*weights) == bool(every)


# The caller's ways to say it.


def test_a_list_by_stage_and_copies_of_several_chunks_of_a_rank() -> None:
    ours, weights = tied(4, (1, 2, 3))
    theirs, _ = tied(4, (1, 2, 3), objects=True)
    first, second, third, fourth = weights
    ties = [{"embedding": [first, third]}, {"embedding": (fourth, second)}]
    with run(placed(ours, 2), ties, deterministic=True) as pipe:
        pipe.step(*words(4))
    expect(theirs, 4, 0)
    assert same_bits(ours, theirs)


def test_several_ties_whose_first_copies_are_on_different_stages() -> None:
    def build(objects: bool) -> tuple[list[nn.Module], dict[str, list[nn.Parameter]]]:
        parts, weights = tied(3, (2,), objects=objects)
        one = nn.Parameter(weights[0].detach().clone() * 2)
        other = one if objects else nn.Parameter(one.detach().clone())
        parts = [parts[0], nn.Sequential(parts[1], Head(one)), nn.Sequential(Head(other), parts[2])]
        return parts, {"words": weights, "memory": [other, one]}

    ours, ties = build(objects=False)
    theirs, _ = build(objects=True)
    with run([*ours], ties, deterministic=True, hint="bfw", split=True) as pipe:
        for number in range(2):
            pipe.step(*words(4, number))
            expect(theirs, 4, number)
    assert same_bits(ours, theirs)


def test_the_norm_of_gradients_counts_a_tied_parameter_once() -> None:
    ours, weights = tied(3, (1, 2))
    theirs, _ = tied(3, (1, 2), objects=True)
    with run([*ours], {"embedding": weights}, deterministic=True) as pipe:
        pipe.step(*words(4))
        expect(theirs, 4, 0)
        norm = pipe.clip_grad_norm_(0.01)
    once = dict.fromkeys(p for module in theirs for p in module.parameters())
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(once, 0.01).item(), rel=TOLERANCE)
    assert gap(ours, theirs) < TOLERANCE
    assert torch.equal(gradient(weights[0]), gradient(weights[2]))
