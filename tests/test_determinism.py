"""``deterministic=True``: bitwise the result of one process, whatever hint, timing, limit and placement."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from batches import long
from deterministic_runs import (
    STAGES,
    WIDTH,
    AnyReady,
    Block,
    assert_bitwise,
    model,
    parts,
    tensors,
    train_in_a_pipeline,
    train_in_one_process,
)
from torch import Tensor, nn

import rrfp
from rrfp.compute.split import backward as split_backward
from rrfp.compute.split.backward import SplitBackward
from rrfp.errors import ConfigError, PipelineAborted

#: torch and the optimizer run on the loop, whose time is virtual.
pytestmark = pytest.mark.allow_blocking("everything runs on the loop, in virtual time")


@pytest.fixture(autouse=True)
def everything_is_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of these sizes would not be."""
    monkeypatch.setattr(split_backward, "MIN_FLOPS", 0.0)


def test_layers_of_these_sizes_are_deferred_here() -> None:
    """Or the tests below would form every gradient in B."""
    x = torch.randn(3, WIDTH, requires_grad=True)
    output = Block()(x)
    pending = SplitBackward(nn.Identity(), 0).run([output], [torch.ones_like(output)], [x])
    assert pending is not None
    assert len(pending.deferred) >= 2


@pytest.mark.parametrize("seeds", [1, long(3)])
@pytest.mark.parametrize("limit", [1, long("n"), None])
@pytest.mark.parametrize(("chunks", "layout"), [(1, "looped"), long(2, "looped"), (2, "v")])
@pytest.mark.parametrize("hint", ["bf", "bfw", long("slot-aware-pyramid"), AnyReady])
def test_five_steps_are_bitwise_those_of_one_process(
    hint: Any, chunks: int, layout: str, limit: Any, seeds: int
) -> None:
    expected = model(STAGES * chunks)
    losses = train_in_one_process(expected)
    for seed in range(seeds):
        modules = model(STAGES * chunks)
        assert train_in_a_pipeline(modules, layout, seed, hint=hint, split=hint != "bf", limit=limit) == losses
        assert_bitwise(modules, expected)


@pytest.mark.parametrize(("strict", "chunks", "layout"), [("zb-h1", 1, "looped"), ("zb-v", 2, "v")])
def test_fixed_orders_are_bitwise_those_of_one_process_too(strict: str, chunks: int, layout: str) -> None:
    expected, modules = model(STAGES * chunks), model(STAGES * chunks)
    assert train_in_a_pipeline(modules, layout, 0, strict=strict, split=True) == train_in_one_process(expected)
    assert_bitwise(modules, expected)


def test_without_it_the_timing_shows_in_the_last_bits() -> None:
    """Or the tests above could not fail."""
    expected = model(STAGES)
    train_in_one_process(expected)
    differences = 0
    for seed in range(3):
        modules = model(STAGES)
        train_in_a_pipeline(modules, "looped", seed, hint=AnyReady, split=True, deterministic=False)
        pairs = zip(tensors(modules), tensors(expected), strict=True)
        differences += any(not torch.equal(a, b) for a, b in pairs)
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(tensors(modules), tensors(expected), strict=True))
    assert differences


class Counting(nn.Module):
    """Writes a buffer in forward, as something that is no BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        seen: Any = self.seen
        seen += x.sum().detach()
        return x


class Averaging(Counting):
    """Assigns it instead."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.9 * self.get_buffer("seen") + x.mean().detach()
        return x


class Normed(nn.Module):
    """BatchNorm over a microbatch's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return normed


def test_batch_statistics_are_those_of_microbatches_in_order() -> None:
    def build() -> list[nn.Module]:
        modules = model(STAGES)
        return [nn.Sequential(module, Normed()) for module in modules]

    expected = build()
    losses = train_in_one_process(expected)
    for seed in range(3):
        modules = build()
        assert train_in_a_pipeline(modules, "looped", seed, hint=AnyReady) == losses
        assert_bitwise(modules, expected)
        for ours, theirs in zip(modules, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))


@pytest.mark.parametrize(("kind", "verb"), [(Counting, "writes"), (Averaging, "replaces")])
def test_another_written_buffer_is_refused_by_name(kind: type[Counting], verb: str) -> None:
    modules = model(STAGES)
    modules[1] = nn.Sequential(modules[1], kind())
    message = rf"virtual stage 1 {verb} its buffer '1.seen' \(of {kind.__name__}\) in forward"
    with pytest.raises(PipelineAborted, match=message):
        train_in_a_pipeline(modules, "looped", 0, hint="bf")


def test_batch_statistics_inside_activation_checkpointing_are_refused_by_name() -> None:
    class Checkpointed(Normed):
        def forward(self, x: Tensor) -> Tensor:
            normed: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
            return normed

    modules = model(STAGES)
    modules[1] = nn.Sequential(modules[1], Checkpointed())
    message = r"virtual stage 1 writes its buffer '1.norm.running_mean' \(of BatchNorm1d\) in backward"
    with pytest.raises(PipelineAborted, match=message):
        train_in_a_pipeline(modules, "looped", 0, hint="bf")


def test_a_mask_that_is_made_when_it_is_first_needed_is_a_constant() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "mask"):
                self.register_buffer("mask", torch.ones(8, 8).tril() / torch.arange(1.0, 9.0)[:, None])
            return self.get_buffer("mask")[: x.shape[1], : x.shape[1]] @ x

    def build() -> list[nn.Module]:
        return [nn.Sequential(module, Masked()) for module in model(STAGES)]

    expected, modules = build(), build()
    losses = train_in_one_process(expected)
    assert train_in_a_pipeline(modules, "looped", 1, hint=AnyReady, split=True) == losses
    assert_bitwise(modules, expected)


def test_a_module_that_cannot_be_split_is_refused_where_gradients_are_added_in_w() -> None:
    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)
            return result

    modules = model(STAGES)
    modules[1] = nn.Sequential(modules[1], Reentrant())
    with pytest.raises(PipelineAborted, match="cannot be split: it uses reentrant checkpointing"):
        train_in_a_pipeline(modules, "looped", 0, hint="bfw", split=True)
    expected = copy.deepcopy(modules)
    losses = train_in_one_process(expected)
    assert train_in_a_pipeline(modules, "looped", 0, hint="bfw", split=False) == losses
    assert_bitwise(modules, expected)


@pytest.mark.parametrize("layout", ["looped", "v"])
def test_statistics_that_two_virtual_stages_share_are_refused_by_name(layout: Any) -> None:
    """Microbatches are in order within each of them, and not between the two."""
    modules = model(4)
    modules[1] = modules[3] = nn.Sequential(modules[1], Normed())
    message = (
        r"virtual stage 1 and virtual stage 3 share '1.norm.running_mean': must be False, or each must have its own"
    )
    with pytest.raises(ConfigError, match=message):
        rrfp.local(parts(modules, layout), placement=layout, deterministic=True)
    rrfp.local(parts(modules, layout), placement=layout)


@pytest.mark.every_other
@pytest.mark.parametrize("hint", ["bfw", AnyReady])
@pytest.mark.parametrize("layout", ["looped", "v"])
def test_a_whole_module_that_two_virtual_stages_share_is_bitwise_that_of_one_process(layout: str, hint: Any) -> None:
    def build() -> list[nn.Module]:
        modules = model(4)
        modules[3] = modules[1]
        return modules

    expected = build()
    losses = train_in_one_process(expected)
    for seed in range(2):
        modules = build()
        assert train_in_a_pipeline(modules, layout, seed, hint=hint, split=True) == losses
        assert_bitwise(modules, expected)


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="deterministic is 1, must be True or False"):
        rrfp.local(model(2), deterministic=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="split is 'yes', must be True or False"):
        rrfp.local(model(2), split="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="placement is 'ring', must be one of: looped, v"):
        rrfp.local(model(2), placement="ring")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="schedule zb-v takes 2 chunks a stage"):
        rrfp.local(model(2), strict="zb-v", split=True)
    with pytest.raises(ConfigError, match="modules have 1 and 2 chunks a stage, must have the same number on all"):
        rrfp.local([model(2), model(1)[0]])
