"""`torch.amp.GradScaler` through a pipeline: losses, scales, skipped steps and parameters of one process."""

from __future__ import annotations

import asyncio
import copy
import itertools
import pickle
from collections import defaultdict
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pipeline.scaled_training import (
    STEPS,
    Course,
    Spikes,
    batch,
    expected,
    loss_fn,
    model,
    new_scaler,
    parameters,
    sgd,
    trained,
)
from runtime.ranks import ThreadedRanks
from torch import nn

import rrfp
from rrfp.errors import ConfigError, RrfpError
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.transports.rendezvous import LocalRendezvous

#: An overflow on a middle stage, one on the first, one on the last in the step after.
SPIKES: Spikes = {(2, 1, 3), (6, 0, 0), (7, 2, 1)}


def same(ours: Course, wanted: Course) -> None:
    """To the last bit."""
    assert ours.losses == wanted.losses
    assert ours.scales == wanted.scales
    assert ours.skipped == wanted.skipped
    assert ours.norms == pytest.approx(wanted.norms, rel=1e-5, nan_ok=True)
    assert all(map(torch.equal, ours.values, wanted.values))
    assert len(ours.values) == len(wanted.values)


def train_local(optimizers: str = "one", spikes: Spikes = (), **how: Any) -> Course:
    modules, scaler = model(3), how.pop("scaler", None) or new_scaler()
    training = {name: how.pop(name) for name in ("accumulate", "max_norm") if name in how}
    steppers = [sgd(modules)] if optimizers == "one" else [sgd([module]) for module in modules]
    with rrfp.local(list(modules), loss_fn=loss_fn, deterministic=True, **how).blocking() as pipe:
        return trained(pipe, modules, steppers, scaler, spikes, stages=3, **training)


def train_ranks(spikes: Spikes, **training: Any) -> list[Course]:
    """Every rank has its own scaler, and an optimizer for weights and one for the rest."""
    modules = model(3)

    def body(stage: int, pipe: BlockingPipeline) -> Course:
        own = [modules[stage]]
        everything = parameters(own)
        weights = [p for p in everything if p.ndim == 2]
        others = [p for p in everything if p.ndim != 2]
        options: dict[str, Any] = {"lr": 0.1, "momentum": 0.5}
        optimizers = [torch.optim.SGD(weights, **options), torch.optim.SGD(others, **options)]
        return trained(pipe, own, optimizers[:: 1 - 2 * (stage % 2)], new_scaler(), spikes, stages=3, **training)

    ranks = ThreadedRanks(modules, body, loss_fn=loss_fn, deterministic=True)
    outcomes = ranks.join()
    assert [outcome.error for outcome in outcomes] == [None] * 3
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("optimizers", ["one", "one a stage"])
@pytest.mark.parametrize("options", [{}, {"split": True, "hint": "bfw"}])
def test_steps_are_those_of_one_process(optimizers: str, options: dict[str, Any]) -> None:
    wanted = expected(3, new_scaler(), SPIKES)
    assert wanted.skipped == [2, 6, 7]
    assert max(wanted.scales) > 2.0**12 > min(wanted.scales)
    same(train_local(optimizers, SPIKES, **options), wanted)


def test_a_scale_that_is_too_large_for_float16_becomes_smaller_until_it_fits() -> None:
    wanted = expected(3, new_scaler(init_scale=2.0**24))
    assert wanted.skipped[:3] == [0, 1, 2]
    assert len(wanted.skipped) < STEPS
    same(train_local(scaler=new_scaler(init_scale=2.0**24)), wanted)


@pytest.mark.parametrize("training", [{}, {"accumulate": 2, "max_norm": 0.01}], ids=["plain", "accumulates, clips"])
def test_all_ranks_skip_the_same_steps(training: dict[str, Any]) -> None:
    wanted = expected(3, new_scaler(), SPIKES, **training)
    courses = train_ranks(SPIKES, **training)
    for course in courses[1:]:
        assert (course.losses, course.scales, course.skipped, course.norms[:1]) == (
            courses[0].losses,
            courses[0].scales,
            courses[0].skipped,
            courses[0].norms[:1],
        )
    courses[0].values = [value for course in courses for value in course.values]
    if training:
        for ours, theirs in zip(courses[0].values, wanted.values, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
        courses[0].values = wanted.values
    same(courses[0], wanted)


def test_a_local_pipeline_accumulates_and_clips() -> None:
    training: dict[str, Any] = {"accumulate": 2, "max_norm": 100.0}
    same(train_local("one a stage", SPIKES, **training), expected(3, new_scaler(), SPIKES, **training))


def test_optimizers_that_unscale_by_themselves_skip_as_well() -> None:
    """Fused ones: torch's scaler does not unscale for them."""
    modules, scaler = model(2), new_scaler()
    optimizers = [torch.optim.AdamW(module.parameters(), fused=True) for module in modules]
    with rrfp.local(list(modules), loss_fn=loss_fn).blocking() as pipe:
        pipe.scale(scaler)
        for spike in (3e38, 0.0):
            before = copy.deepcopy(modules)
            pipe.step(*batch(0), kwargs={1: [{"spike": spike}] * 4})
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
            changed = [not torch.equal(a, b) for a, b in zip(parameters(modules), parameters(before), strict=True)]
            assert any(changed) is (spike == 0.0)
            assert any(changed[:2]) is (spike == 0.0)


def test_a_gradient_that_the_caller_changes_on_one_rank_counts_on_all() -> None:
    modules = model(3)

    def body(stage: int, pipe: BlockingPipeline) -> Any:
        scaler, optimizer, scales = pipe.scale(new_scaler()), sgd([modules[stage]]), []
        for step in range(3):
            pipe.step(*batch(step))
            if (step, stage) == (1, 2):
                parameters(modules)[-1].grad.fill_(torch.nan)  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales

    outcomes = ThreadedRanks(modules, body, loss_fn=loss_fn).join()
    assert [outcome.value for outcome in outcomes] == [[2.0**12, 2.0**11, 2.0**11]] * 3


def test_a_rank_without_an_optimizer_updates_its_scale_with_the_others() -> None:
    modules = model(3)
    modules[1].requires_grad_(False)

    def body(stage: int, pipe: BlockingPipeline) -> Any:
        scaler, scales = pipe.scale(new_scaler(growth_interval=100)), []
        optimizer = None if stage == 1 else sgd([modules[stage]])
        for step in range(5):
            pipe.step(*batch(step), kwargs={0: [{"spike": 3e38 if step == 2 else 0.0}] * 4})
            if optimizer is not None:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    outcomes = ThreadedRanks(modules, body, loss_fn=loss_fn).join()
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert [outcome.value for outcome in outcomes] == [[2.0**12, 2.0**12, 2.0**11, 2.0**11, 2.0**11]] * 3


def test_a_gradient_that_no_optimizer_zeroes_does_not_skip_all_later_steps() -> None:
    modules, scaler = model(2), new_scaler(growth_interval=100)
    optimizer = torch.optim.SGD([p for p in parameters(modules) if p.ndim], lr=0.1)
    with rrfp.local(list(modules), loss_fn=loss_fn).blocking() as pipe:
        pipe.scale(scaler)
        for step in range(3):
            pipe.step(*batch(step), kwargs={0: [{"spike": 0.0 if step else 3e38}] * 4})
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert not parameters(modules)[0].isnan().any()
    assert scaler.get_scale() == 2.0**11


def test_an_evaluation_is_not_scaled() -> None:
    modules, scaler = model(2), new_scaler()
    with rrfp.local(list(modules), loss_fn=loss_fn).blocking() as pipe, torch.autocast("cpu", dtype=torch.float16):
        before = pipe.evaluate(*batch(0))
        assert pipe.scale(scaler) is scaler
        assert pipe.evaluate(*batch(0)).losses == before.losses
        result = pipe.step(*batch(0))
        assert (result.loss, result.losses) == (before.loss, before.losses)
        scaler.step(sgd(modules))
        scaler.update(2.0**10)
        pipe.evaluate(*batch(1))  # no gradient of this step is scaled by what has changed


async def train_async(pipe: Any, modules: list[nn.Module], *, waits: bool) -> list[float]:
    """Three steps, the second with an overflow on stage 1; returns the scales."""
    scaler, optimizer, scales = pipe.scale(new_scaler()), sgd(modules), []
    for step in range(3):
        await pipe.step(*batch(step), kwargs={1: [{"spike": 3e38 if step == 1 else 0.0}] * 4})
        if waits:
            await pipe.unscale_(optimizer)
            await pipe.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("loop", ["own", "caller"])
@pytest.mark.parametrize("waits", [False, True])
async def test_the_async_pipeline_has_the_same_scales(loop: Any, waits: bool) -> None:
    modules = model(2)
    async with rrfp.local(list(modules), loss_fn=loss_fn, loop=loop) as pipe:
        assert await train_async(pipe, modules, waits=waits) == [2.0**12, 2.0**11, 2.0**11]


def ranks_on_one_loop(modules: list[nn.Module], **options: Any) -> list[rrfp.Pipeline]:
    met, count = LocalRendezvous(), len(modules)
    with patch("rrfp.pipeline.api._numbers", defaultdict(lambda: itertools.repeat(0))):
        return [
            rrfp.Pipeline(
                module,
                topology=rrfp.Topology(stage, count),
                rendezvous=met,
                transport="inproc",
                loss_fn=loss_fn,
                **options,
            )
            for stage, module in enumerate(modules)
        ]


@pytest.mark.parametrize("loop", ["own", "caller"])
async def test_ranks_on_one_loop_await_each_other(loop: Any) -> None:
    modules = model(3)

    async def run(stage: int, pipeline: rrfp.Pipeline) -> list[float]:
        async with pipeline as pipe:
            return await train_async(pipe, [modules[stage]], waits=True)

    runs = (run(*each) for each in enumerate(ranks_on_one_loop(modules, loop=loop)))
    assert await asyncio.gather(*runs) == [[2.0**12, 2.0**11, 2.0**11]] * 3


async def test_a_loop_that_serves_the_pipeline_cannot_wait_for_other_ranks() -> None:
    modules = model(2)

    async def run(pipeline: rrfp.Pipeline) -> None:
        async with pipeline as pipe:
            with pytest.raises(RrfpError, match=r"await pipe.unscale_\(optimizer\) before scaler.step"):
                await train_async(pipe, modules, waits=False)

    await asyncio.gather(*map(run, ranks_on_one_loop(modules, loop="caller")))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "the scale of the loss is 4096 on stage 0 and absent on stage 1: must be the same; call scale()"),
        ({"enabled": False}, "the scale of the loss is 4096 on stage 0 and absent on stage 1"),
        ({"init_scale": 2.0}, "the scale of the loss is 4096 on stage 0 and 2 on stage 1"),
    ],
)
def test_ranks_with_different_scales_are_named(options: dict[str, Any], text: str) -> None:
    def body(stage: int, pipe: BlockingPipeline) -> Any:
        if stage == 0 or options:
            pipe.scale(new_scaler(**(options if stage else {})))
        pipe.step(*batch(0))

    for outcome in ThreadedRanks(model(2), body, loss_fn=loss_fn).join():
        assert text in outcome.abort.origin.cause


def test_a_failure_reaches_ranks_that_compare_overflows() -> None:
    modules = model(3)

    def body(stage: int, pipe: BlockingPipeline) -> Any:
        scaler = pipe.scale(new_scaler())
        pipe.step(*batch(0))
        if stage == 1:
            raise ValueError("enough")
        scaler.step(sgd([modules[stage]]))

    outcomes = ThreadedRanks(modules, body, loss_fn=loss_fn).join()
    for stage in (0, 2):
        assert str(outcomes[stage].abort) == "aborted by stage 1: ValueError: enough"


def test_a_rank_that_does_not_compare_ends_all_by_name() -> None:
    modules = model(2)

    def body(stage: int, pipe: BlockingPipeline) -> Any:
        scaler = pipe.scale(new_scaler())
        pipe.step(*batch(0))
        if stage == 0:
            scaler.step(sgd([modules[stage]]))
        pipe.clip_grad_norm_(1.0)

    for outcome in ThreadedRanks(modules, body, loss_fn=loss_fn, stall_after=0.2).join():
        assert "stage 0 is in GradScaler.step, stage 1 is in clip_grad_norm_" in outcome.abort.origin.cause


def gradients(modules: list[nn.Module]) -> list[torch.Tensor]:
    return [p.grad.clone() for p in parameters(modules) if p.grad is not None]


def test_unscale_divides_the_gradients_by_the_scale_on_both_faces() -> None:
    modules, others = model(2), model(2)
    optimizer, another = sgd(modules), sgd(others)  # the first one of a process takes longer than a loop may

    async def train() -> None:
        async with rrfp.local(list(others), loss_fn=loss_fn) as pipe:
            pipe.scale(new_scaler())
            await pipe.step(*batch(0))
            await pipe.unscale_(another)

    asyncio.run(train())
    with rrfp.local(list(modules), loss_fn=loss_fn).blocking() as blocking:
        scale = blocking.scale(new_scaler()).get_scale()
        blocking.step(*batch(0))
        scaled = gradients(modules)
        blocking.unscale_(optimizer)
    for unscaled in (gradients(modules), gradients(others)):
        torch.testing.assert_close([scale * gradient for gradient in unscaled], scaled)


def test_a_disabled_scaler_does_nothing() -> None:
    modules, scaler = model(2), new_scaler(enabled=False)
    optimizer = sgd(modules)
    with rrfp.local(list(modules), loss_fn=loss_fn).blocking() as pipe:
        assert pipe.scale(scaler) is scaler
        pipe.step(*batch(0))
        pipe.unscale_(optimizer)
        scaler.unscale_(optimizer)
        unscaled = [p.grad for p in parameters(modules)]
        assert max(float(g.abs().max()) for g in unscaled if g is not None) < 1.0
        before = parameters(modules)[1].detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(before, parameters(modules)[1])
        assert scaler.state_dict() == {}


def test_what_is_refused() -> None:
    first = rrfp.local(list(model(2)), loss_fn=loss_fn)
    second = rrfp.local(list(model(2)), loss_fn=loss_fn)
    with pytest.raises(ConfigError, match=r"scaler is of type float, must be a torch\.amp\.GradScaler"):
        first.scale(2.0)  # type: ignore[type-var]
    scaler = first.scale(new_scaler())
    second.scale(scaler)
    with first.blocking() as pipe:
        with pytest.raises(ConfigError, match=r"the scaler was passed to scale\(\) of another pipeline"):
            pipe.step(*batch(0))
        pipe.scale(scaler)
        with pytest.raises(ConfigError, match="scaler belongs to another pipeline in use"):
            second.scale(scaler)
    second.scale(scaler)
    with pytest.raises(RrfpError, match=r"this pipeline is closed: call scale\(\) of a new one"):
        first.scale(new_scaler())
    with second.blocking() as pipe:
        pipe.scale(new_scaler(init_scale=0.0))
        with pytest.raises(ConfigError, match=r"the scale of the GradScaler is 0\.0, must be a positive finite number"):
            pipe.step(*batch(0))
    with (
        rrfp.local(list(model(2)), loss_fn=loss_fn).blocking() as pipe,
        pytest.raises(ConfigError, match=r"unscale_ needs a scaler: call scale\(\)"),
    ):
        pipe.unscale_()


def test_a_scale_that_changes_between_steps_that_accumulate_is_refused() -> None:
    modules, scaler = model(2), new_scaler()
    optimizer = sgd(modules)
    with rrfp.local(list(modules), loss_fn=loss_fn).blocking() as pipe:
        pipe.scale(scaler)
        pipe.step(*batch(0))
        scaler.step(optimizer)
        scaler.update(2.0**10)
        with pytest.raises(ConfigError, match=r"the scale changed from 4096 to 1024, and .grad holds gradients"):
            pipe.step(*batch(1))
        optimizer.zero_grad(set_to_none=False)
        pipe.step(*batch(1))


def test_an_overflow_after_the_comparison_is_an_error() -> None:
    modules, scaler = model(2), new_scaler()
    first, second = sgd(modules[:1]), sgd(modules[1:])
    with rrfp.local(list(modules), loss_fn=loss_fn).blocking() as pipe:
        pipe.scale(scaler)
        pipe.step(*batch(0))
        scaler.unscale_(first)
        parameters(modules)[-1].grad.fill_(torch.inf)  # type: ignore[union-attr]
        with pytest.raises(RrfpError, match="inf or nan that was not, or was not known, when the ranks compared"):
            scaler.unscale_(second)


def test_a_scaler_goes_on_in_another_pipeline_from_its_state() -> None:
    wanted = expected(3, new_scaler(), SPIKES)
    modules, scaler, course = model(3), new_scaler(), Course()
    optimizer = sgd(modules)
    for step in range(STEPS):
        if step in (4, 7):  # after a step without, and one with an overflow
            state = scaler.state_dict()
            scaler = new_scaler(init_scale=1.0)
            scaler.load_state_dict(state)
        if step == 5:
            scaler = copy.deepcopy(scaler)
        if step == 6:
            scaler = pickle.loads(pickle.dumps(scaler))
        assert type(scaler).__name__ == "GradScaler"
        with rrfp.local(list(modules), loss_fn=loss_fn, deterministic=True).blocking() as pipe:
            pipe.scale(scaler)
            kwargs = {v: [{"spike": 3e38 if (step, v, m) in SPIKES else 0.0} for m in range(4)] for v in range(3)}
            with torch.autocast("cpu", dtype=torch.float16):
                course.losses.append(pipe.step(*batch(step), kwargs=kwargs).losses)
            scaler.step(optimizer)
            course.update(scaler, step)
            optimizer.zero_grad()
    same(course.keep(modules), wanted)


def test_bfloat16_needs_no_scaler() -> None:
    off = new_scaler(enabled=False)
    wanted = expected(3, off, dtype=torch.bfloat16)
    modules = model(3)
    with rrfp.local(list(modules), loss_fn=loss_fn, deterministic=True).blocking() as pipe:
        ours = trained(pipe, modules, [sgd(modules)], off, stages=3, dtype=torch.bfloat16)
    same(ours, wanted)


def test_a_parameter_of_two_stages_is_scaled_once() -> None:
    def run(pipelined: bool) -> tuple[list[torch.Tensor], list[float]]:
        first, *others = model(3)
        modules = [first, *others, first]
        scaler, scales, used = new_scaler(init_scale=2.0**22), [], [first, *others]
        optimizer = sgd(used)
        pipeline = rrfp.local([nn.Sequential(module) for module in modules], loss_fn=loss_fn, deterministic=True)
        with pipeline.blocking() as pipe:
            pipe.scale(scaler)
            for step in range(STEPS):
                with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):  # one use after the other
                    if pipelined:
                        pipe.step(*batch(step))
                    for x, target in () if pipelined else zip(*batch(step), strict=True):
                        loss = loss_fn(nn.Sequential(*modules)(x), target)
                        scaler.scale(loss / 4).backward()  # type: ignore[no-untyped-call]
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scales.append(scaler.get_scale())
        return [p.detach() for p in parameters(used)], scales

    ours, wanted = run(True), run(False)
    assert ours[1] == wanted[1]
    assert min(ours[1]) < 2.0**22
    for left, right in zip(ours[0], wanted[0], strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)
