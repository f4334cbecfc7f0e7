"""Ties that cannot be, and ranks that wait for each other's copies: one error on every rank that names the tie."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from runtime.ranks import ThreadedRanks, as_in_processes
from runtime.tied_models import expect, same_bits, tied, words
from torch import Tensor, nn

import rrfp
from rrfp import Topology
from rrfp.errors import ConfigError, TransportError
from rrfp.model.mesh import Mesh
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.transports.rendezvous import LocalRendezvous


@pytest.mark.parametrize(
    ("ties", "text"),
    [
        (7, "ties is of type int, must be a dict, or a list of 2, one a stage"),
        ([{}], "ties is of type list, must be a dict, or a list of 2, one a stage"),
        ([{}, 5], "ties is of type int, must be a dict of parameters by name"),
        ({3: None}, "ties has the key 3, must be a name"),
        ({"it": 5}, "ties['it'] is 5 (of type int), must be a parameter of a module of this rank"),
        (
            {"it": nn.Parameter(torch.ones(2, 3))},
            "ties['it'] is a tensor of shape (2, 3) that no module of this rank has, must be a parameter of a module "
            "of this rank",
        ),
    ],
)
def test_what_is_no_tie_is_refused(ties: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rrfp.local([*tied(2)[0]], ties=ties)
    assert str(caught.value) == text


def test_a_parameter_of_another_stage_two_names_and_two_parameters_are_refused() -> None:
    parts, weights = tied(2)
    first, head = weights
    other = next(p for p in parts[0].parameters() if p is not first)
    for ties, text in (
        ([{"it": head}, {"it": first}], "is a tensor of shape (20, 16) that no module of this rank has"),
        ({"it": weights, "that": [head]}, "ties['that'] is the parameter of ties['it'] too, must be in one tie"),
        ({"it": [first, head, other]}, "ties['it'] has two parameters of virtual stage 0, must have one"),
    ):
        with pytest.raises(ConfigError) as caught:
            rrfp.local([*parts], ties=ties)
        assert text in str(caught.value)


# Ranks that differ.


def alone(weights: list[nn.Parameter]) -> None: ...


def wider(weights: list[nn.Parameter]) -> None:
    weights[2].data = torch.zeros(21, 16, dtype=torch.float64)


def narrow(weights: list[nn.Parameter]) -> None:
    weights[2].data = weights[2].data.float()


def moved(weights: list[nn.Parameter]) -> None:
    weights[2].data[3, 4] += 1e-16


def frozen(weights: list[nn.Parameter]) -> None:
    weights[0].requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            alone,
            "tie 'embedding' is on virtual stage 0 (stage 0) alone, must be on two at least: every rank with a copy "
            "passes it by the same name",
        ),
        (
            wider,
            "tie 'embedding' is (20, 16) of torch.float64 on stage 0 and (21, 16) of torch.float64 on stage 2: must be "
            "the same",
        ),
        (
            narrow,
            "tie 'embedding' is (20, 16) of torch.float64 on stage 0 and (20, 16) of torch.float32 on stage 2: must be "
            "the same",
        ),
        (
            moved,
            "tie 'embedding' has other values on stage 2 than on stage 0: must start equal, from one checkpoint or one "
            "seed",
        ),
        (frozen, "tie 'embedding' requires grad on stage 1 and not on stage 0: must be the same"),
    ],
)
@pytest.mark.parametrize("transport", ["inproc", "zmq"])
def test_copies_that_do_not_fit_are_one_error_on_all_ranks(transport: str, change: Any, text: str) -> None:
    parts, weights = tied(3, (1, 2))
    weights[2].data[3, 4] = 1e-3
    weights[0].data[3, 4] = weights[1].data[3, 4] = 1e-3
    change(weights)
    own = {v: {"ties": {"embedding" if change is not alone else f"of {v}": weight}} for v, weight in enumerate(weights)}
    if change is alone:
        own = {0: {"ties": {"embedding": weights[0]}}}
    outcomes = ThreadedRanks([*parts], lambda stage, pipe: None, own, transport=transport).join()
    assert [type(outcome.error) for outcome in outcomes] == [ConfigError] * 3
    assert {str(outcome.error) for outcome in outcomes} == {text}


# Parameters that are replaced.


def assigned(parts: list[nn.Module]) -> None:
    parts[0].load_state_dict(dict(parts[0].state_dict()), assign=True)


def set_anew(parts: list[nn.Module]) -> None:
    head: Any = parts[1][1]  # type: ignore[index]
    head.weight = nn.Parameter(head.weight.detach().clone())


def emptied(parts: list[nn.Module]) -> None:
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        parts[0].to_empty(device="cpu")
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def another_module(parts: list[nn.Module]) -> None:
    parts[0][0] = nn.Embedding(20, 16, dtype=torch.float64)  # type: ignore[operator]


def removed(parts: list[nn.Module]) -> None:
    parts[1][1] = nn.Identity()  # type: ignore[operator]


@pytest.mark.parametrize("objects", [False, True], ids=["copies", "objects"])
@pytest.mark.parametrize("before", [True, False], ids=["before entering", "between steps"])
@pytest.mark.parametrize(
    ("replace", "name", "stage"),
    [
        (assigned, "0.weight", 0),
        (emptied, "0.weight", 0),
        (set_anew, "1.weight", 1),
        (another_module, "0.weight", 0),
        (removed, "1.weight", 1),
    ],
)
def test_a_tied_parameter_that_was_replaced_is_refused(
    replace: Callable[[list[nn.Module]], None], name: str, stage: int, before: bool, objects: bool
) -> None:
    """Each copy would keep its own gradient. A shared object that no one named is tied too."""
    parts, weights = tied(2, objects=objects)
    ties = None if objects else {"embedding": weights}
    pipeline = rrfp.local([*parts], loss_fn=nn.functional.mse_loss, ties=ties)
    tie = "0.weight@0" if objects else "embedding"

    def refused(call: Callable[[], object]) -> None:
        replace(parts)
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value).startswith(
            f"tie {tie!r}: parameter {name!r} of virtual stage {stage} is not the object that it was when the pipeline "
            "was made, so its gradients would not be summed: must stay the same. load_state_dict(assign=True), "
        )

    blocking = pipeline.blocking()
    if before:
        refused(blocking.__enter__)
        return
    with blocking as pipe:
        pipe.step(*words(3))
        refused(lambda: pipe.step(*words(3)))


@pytest.mark.allow_blocking(reason="it tells the other rank before there is a loop of its own")
async def test_one_that_was_replaced_before_entering_ends_the_start_of_the_other_rank_too() -> None:
    parts, weights = tied(2)
    options: dict[str, Any] = {"rendezvous": LocalRendezvous(), "transport": "inproc", "connect_timeout": 10.0}
    with as_in_processes():
        pipelines = [
            rrfp.Pipeline(
                part, topology=Topology(rank, 2), loss_fn=nn.functional.mse_loss, ties={"embedding": weight}, **options
            )
            for rank, (part, weight) in enumerate(zip(parts, weights, strict=True))
        ]
    set_anew(parts)

    async def enter(pipeline: rrfp.Pipeline) -> None:
        async with pipeline:
            pass

    first, second = await asyncio.gather(*map(enter, pipelines), return_exceptions=True)
    assert isinstance(second, ConfigError)
    assert isinstance(first, TransportError)
    assert str(first).startswith(f"stage 1 says, through the store: ConfigError: {second!s:.100}")


def test_a_tied_parameter_that_only_got_another_name_or_other_values_is_still_tied() -> None:
    """A parametrization keeps the object under another name; loading in place writes into it."""
    parts, weights = tied(2)
    theirs, _ = tied(2, objects=True)
    with rrfp.local([*parts], loss_fn=nn.functional.mse_loss, ties={"embedding": weights}).blocking() as pipe:
        for part, path in ((parts[0][0], "weight"), (parts[1][1], "weight")):  # type: ignore[index]
            nn.utils.parametrize.register_parametrization(part, path, nn.Identity())
        parts[0].load_state_dict(parts[0].state_dict())
        pipe.step(*words(3))
    expect(theirs, 3, 0)
    assert weights[0].grad is not None
    assert weights[1].grad is not None
    assert torch.equal(weights[0].grad, weights[1].grad)
    other = theirs[0][0].weight.grad  # type: ignore[index]
    torch.testing.assert_close(weights[0].grad, other, rtol=0, atol=1e-12)


# Ranks that wait for each other.


def one_step(stage: int, pipe: BlockingPipeline) -> None:
    pipe.step(*words(3))


def each_with_its_own(weights: list[nn.Parameter], places: list[int]) -> dict[int, dict[str, Any]]:
    return {v: {"ties": {"embedding": weight}} for v, weight in zip(places, weights, strict=True)}


@pytest.mark.parametrize("transport", ["inproc", "zmq"])
def test_copies_on_ranks_that_are_no_neighbours(transport: str) -> None:
    """Of 6 ranks, 2 and 5 exchange nothing else."""
    parts, weights = tied(6, (2, 5))
    theirs, _ = tied(6, (2, 5), objects=True)
    own = each_with_its_own(weights, [0, 2, 5])
    options: Any = {"transport": transport, "deterministic": True, "loss_fn": nn.functional.mse_loss}
    outcomes = ThreadedRanks([*parts], one_step, own, **options).join()
    assert [outcome.error for outcome in outcomes] == [None] * 6
    expect(theirs, 3, 0)
    assert same_bits(parts, theirs)


def test_in_groups_each_member_is_tied_to_the_same_member_of_other_stages() -> None:
    """Two stages of two ranks. The members of a group compute the same here, but the second has another embedding."""
    mesh = Mesh((("pp", 2), ("tp", 2)))
    models = [tied(2), tied(2)]
    theirs = [tied(2, objects=True)[0] for _ in models]
    with torch.no_grad():
        for weight in (*models[1][1], next(theirs[1][0].parameters())):
            weight.mul_(2.0)
    parts = [models[member][0][stage] for stage in range(2) for member in range(2)]
    own = {
        2 * stage + member: {
            "topology": Topology.at(2 * stage + member, mesh),
            "ties": {"embedding": models[member][1][stage]},
        }
        for stage in range(2)
        for member in range(2)
    }
    options: Any = {"loss_fn": nn.functional.mse_loss, "deterministic": True}
    outcomes = ThreadedRanks([*parts], one_step, own, **options).join()
    assert [outcome.error for outcome in outcomes] == [None] * 4
    for (ours, _), likes in zip(models, theirs, strict=True):
        expect(likes, 3, 0)
        assert same_bits(ours, likes)


def test_a_rank_that_does_not_reduce_is_found_as_a_deadlock_that_names_the_tie() -> None:
    parts, weights = tied(3)

    def disagree(stage: int, pipe: BlockingPipeline) -> None:
        pipe.step(*words(3), reduce_gradients=stage != 2)

    own = each_with_its_own(weights, [0, 2])
    options: Any = {"loss_fn": nn.functional.mse_loss, "stall_after": 0.2}
    for outcome in ThreadedRanks([*parts], disagree, own, **options).join():
        text = outcome.abort.origin.cause
        assert text.startswith("DeadlockError: deadlock in step 0: every rank is idle and nothing is in flight")
        assert "  stage 0 waits for: the gradients of tie 'embedding' from stage 2" in [
            line.partition(" [")[0] for line in text.splitlines()
        ]


def test_a_rank_that_fails_ends_those_that_wait_for_its_copy() -> None:
    parts, weights = tied(3)

    def explode(parameter: Tensor) -> None:
        raise ValueError("enough")

    weights[1].register_post_accumulate_grad_hook(explode)  # type: ignore[no-untyped-call]
    own = each_with_its_own(weights, [0, 2])
    options: Any = {"loss_fn": nn.functional.mse_loss, "split": True}
    for outcome in ThreadedRanks([*parts], one_step, own, **options).join():
        assert outcome.abort.origin.cause == "ValueError: enough"
        assert outcome.abort.origin.stage == 2
