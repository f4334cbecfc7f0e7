"""The demo's GPT: one model however it is cut, and one that learns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from rrfp.errors import ConfigError
from rrfp.lab.demo.model import GptConfig, build_stages, loss_fn
from rrfp.lab.demo.text import batches, load_text

SMALL = GptConfig(sequence_length=32, layers=6, width=16, heads=2)


def weights(stages: list[nn.Module]) -> list[Tensor]:
    return [parameter for stage in stages for parameter in stage.parameters()]


@pytest.mark.parametrize("num_stages", [2, 4, 6, 8, 12])
def test_every_cut_is_the_same_model(num_stages: int) -> None:
    [whole], stages = build_stages(SMALL, 1, seed=3), build_stages(SMALL, num_stages, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(weights([whole]), weights(stages), strict=True))
    tokens = torch.arange(20).reshape(2, 10)
    x = tokens
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, whole(tokens))
    assert x.shape == (2, 10, 256)


def test_layers_and_seeds_differ_and_the_callers_random_state_stays() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = (build_stages(SMALL, 6, seed=seed) for seed in (0, 1))
    assert torch.equal(before, torch.get_rng_state())
    matrices = [p for stages in (first, second) for p in weights(stages) if p.dim() == 2 and p.shape[0] == 48]
    assert len({p.detach().sum().item() for p in matrices}) == len(matrices) == 12


def test_blocks_are_spread_evenly() -> None:
    sizes = [sum(1 for _ in stage.children()) for stage in build_stages(SMALL, 4)]
    assert sizes == [2 + 1, 1, 2, 1 + 1]
    layers_and_halves = [[type(part).__name__ for part in stage.children()] for stage in build_stages(SMALL, 12)]
    assert layers_and_halves == [
        ["Embedding", "Attention"],
        *[["Perceptron"], ["Attention"]] * 5,
        ["Perceptron", "Head"],
    ]


def test_a_token_does_not_see_what_follows() -> None:
    [model] = build_stages(SMALL, 1)
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 9] = 200
    difference = (model(tokens) - model(changed)).abs().sum(-1)[0]
    assert difference[:9].max() == 0
    assert difference[9:].min() > 0


def test_every_parameter_gets_a_gradient() -> None:
    [model] = build_stages(SMALL, 1)
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    loss_fn(model(tokens), tokens + 1).backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_it_learns_the_default_text() -> None:
    [model] = build_stages(SMALL, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches(load_text(), steps=30, microbatches=1, microbatch_size=16, sequence_length=32):
        [(inputs, targets)] = batch
        loss = loss_fn(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert losses[-1] < losses[0] - 1.5


@pytest.mark.parametrize("num_stages", [0, 13])
def test_there_is_at_least_half_a_layer_a_stage(num_stages: int) -> None:
    with pytest.raises(ConfigError, match=rf"^stages is {num_stages}, must be 1\.\.12"):
        build_stages(SMALL, num_stages)


def test_impossible_sizes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^layers is 0, must be at least 1$"):
        GptConfig(layers=0)
    with pytest.raises(ConfigError, match=r"^width is 10, must be a multiple of heads"):
        GptConfig(width=10)
    with pytest.raises(ConfigError, match=r"^seed is -1"):
        build_stages(SMALL, 1, seed=-1)
