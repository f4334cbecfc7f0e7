"""A `torch.amp.GradScaler`, `unscale_` and clipping on a graph: losses, scales and parameters of one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from pipeline.scaled_training import MICROBATCHES, SPIKE, STEPS, WIDTH, Course, Spiky, loss_fn, new_scaler, parameters
from runtime.ranks import ThreadedRanks
from torch import Tensor, nn

import rrfp
from rrfp.pipeline.faces import BlockingPipeline

PARTS = ("vision", "audio", "lm")
STAGES: Sequence[Sequence[str]] = (("vision", "audio"), ("lm",))

#: Steps in which the gradient of one parameter of one part overflows, in microbatch 1.
SPIKES = {2: "audio", 5: "vision", 7: "lm"}


class Reader(Spiky):
    """Adds up what it reads."""

    def forward(
        self, x: Tensor, spike: float = 0.0, image: Tensor | None = None, sound: Tensor | None = None
    ) -> Tensor:
        return super().forward(sum((each for each in (image, sound) if each is not None), x), spike)


def modules() -> dict[str, nn.Module]:
    """The same in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {"vision": Spiky(), "audio": Spiky(), "lm": Reader()}


def graph() -> rrfp.Graph:
    declared = rrfp.Graph()
    encoders = {name: declared.part(name, stages=[0], optional=True) for name in PARTS[:2]}
    declared.part("lm", stages=[1], reads={"image": encoders["vision"], "sound": encoders["audio"]})
    return declared


def batch(step: int) -> tuple[dict[str, list[Tensor]], dict[str, list[bool]], dict[str, list[dict[str, float]]]]:
    """Inputs, visits and keyword arguments. Every third step nobody visits the image encoder."""
    drawn = torch.randn(3, MICROBATCHES, 4, WIDTH, generator=torch.Generator().manual_seed(step))
    visits = {"vision": [step % 3 != 1 and m != 2 for m in range(MICROBATCHES)], "audio": [False, True, True, False]}
    spikes = {
        name: [{"spike": SPIKE if m == 1 and SPIKES.get(step) == name else 0.0} for m in range(MICROBATCHES)]
        for name in PARTS
    }
    return {name: list(own) for name, own in zip(PARTS, drawn, strict=True)}, visits, spikes


def sgd(of: Iterable[nn.Module]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters(of), lr=0.1, momentum=0.5)


def losses_of_one_process(own: Mapping[str, nn.Module], step: int, scaler: Any) -> tuple[float, ...]:
    """Forward and backward of every microbatch, in turn."""
    inputs, visits, spikes = batch(step)
    losses = []
    for m in range(MICROBATCHES):
        with torch.autocast("cpu", dtype=torch.float16):
            image, sound = (
                own[name](inputs[name][m], **spikes[name][m]) if visits[name][m] else None for name in PARTS[:2]
            )
            output = own["lm"](inputs["lm"][m], **spikes["lm"][m], image=image, sound=sound)
            loss = loss_fn(output, inputs["lm"][m])
        scaler.scale(loss / MICROBATCHES).backward()
        losses.append(loss.item())
    return tuple(losses)


def expected(max_norm: float | None) -> Course:
    """Plain torch, in one process."""
    own, scaler, course = modules(), new_scaler(), Course()
    optimizer = sgd(own.values())
    for step in range(STEPS):
        course.losses.append(losses_of_one_process(own, step, scaler))
        if max_norm is not None:
            scaler.unscale_(optimizer)
            course.norms.append(float(nn.utils.clip_grad_norm_(parameters(own.values()), max_norm)))
        scaler.step(optimizer)
        course.update(scaler, step)
        optimizer.zero_grad()
    return course.keep(own.values())


def trained(pipe: BlockingPipeline, own: Sequence[nn.Module], max_norm: float | None) -> Course:
    """The same through a pipeline, on a rank that has the modules ``own``."""
    scaler, optimizer, course = new_scaler(), sgd(own), Course()
    pipe.scale(scaler)
    for step in range(STEPS):
        inputs, visits, spikes = batch(step)
        with torch.autocast("cpu", dtype=torch.float16):
            course.losses.append(pipe.step(inputs, inputs["lm"], visits=visits, kwargs=spikes).losses)
        if max_norm is not None:
            scaler.unscale_(optimizer)
            course.norms.append(pipe.clip_grad_norm_(max_norm))
        scaler.step(optimizer)
        course.update(scaler, step)
        optimizer.zero_grad()
    return course.keep(own)


def same(ours: Course, wanted: Course) -> None:
    """To the last bit, unless gradients were clipped: norms are summed in another order."""
    assert (ours.losses[0], ours.scales, ours.skipped) == (wanted.losses[0], wanted.scales, wanted.skipped)
    assert ours.norms == pytest.approx(wanted.norms, rel=1e-5, nan_ok=True)
    exactly: Any = {"rtol": 1e-3, "atol": 1e-6} if wanted.norms else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(ours.losses, wanted.losses, **exactly)
    torch.testing.assert_close(ours.values, wanted.values, **exactly)


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_an_overflow_in_one_part_skips_the_step_of_all(max_norm: float | None) -> None:
    wanted, own = expected(max_norm), modules()
    assert wanted.skipped == list(SPIKES)
    assert max_norm is None or max(norm for step, norm in enumerate(wanted.norms) if step not in SPIKES) > max_norm
    by_stage = [{name: own[name] for name in names} for names in STAGES]
    with rrfp.local(by_stage, graph=graph(), loss_fn=loss_fn, deterministic=True).blocking() as pipe:
        same(trained(pipe, list(own.values()), max_norm), wanted)


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_ranks_with_scalers_of_their_own_skip_the_same_steps(max_norm: float | None) -> None:
    own = modules()

    def body(stage: int, pipe: BlockingPipeline) -> Course:
        return trained(pipe, [own[name] for name in STAGES[stage]], max_norm)

    by_stage: list[Any] = [{name: own[name] for name in names} for names in STAGES]
    outcomes = ThreadedRanks(by_stage, body, graph=graph(), loss_fn=loss_fn, deterministic=True).join()
    assert [outcome.error for outcome in outcomes] == [None, None]
    first, second = (outcome.value for outcome in outcomes)
    assert (first.losses, first.scales, first.norms) == (
        second.losses,
        second.scales,
        pytest.approx(second.norms, nan_ok=True),
    )
    first.values += second.values
    same(first, expected(max_norm))
