"""The models of these tests, their data, and the comparison with the one-process reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.gpu.target import Target
from rrfp.lab.demo.model import GptConfig, build_stages, loss_fn
from rrfp.model.placement import Layout, Placement
from rrfp.testing.reference import ReferenceResult, reference

__all__ = ["DEMO", "LARGE", "Model", "loss_fn", "placed"]


@dataclass(frozen=True)
class Model:
    """A GPT and the size of its batches.

    Attributes:
        gpt: its size.
        dtype: of parameters.
        rows: of a microbatch.
        microbatches: M.
        tolerance: the largest relative difference of a parameter's gradient that rounding explains.
        dropout: behind every stage.
    """

    gpt: GptConfig
    dtype: torch.dtype = torch.float32
    rows: int = 2
    microbatches: int = 8
    tolerance: float = 1e-4
    dropout: float = 0.0

    def build(self, target: Target, virtual_stages: int) -> list[nn.Module]:
        """The same modules each time, on the device."""
        with target.where:
            built = build_stages(self.gpt, virtual_stages)
        for stage in built[:-1]:
            assert isinstance(stage, nn.Sequential)
            stage.append(nn.Dropout(self.dropout))
        return [stage.to(self.dtype) for stage in built]

    def batch(self, target: Target, step: int) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and targets by microbatch, on the device; the lengths of sequences differ."""
        generator = torch.Generator().manual_seed(step)
        longest = self.gpt.sequence_length
        lengths = [max(1, longest * (4 - (m + step) % 3) // 4) for m in range(self.microbatches)]
        texts = [torch.randint(self.gpt.vocabulary, (self.rows, n + 1), generator=generator) for n in lengths]
        on_device = [text.to(target.where) for text in texts]
        return [text[:, :-1].contiguous() for text in on_device], [text[:, 1:].contiguous() for text in on_device]

    def expect(self, modules: Sequence[nn.Module], target: Target, steps: int) -> list[ReferenceResult]:
        """Run so many steps of the reference; the gradients add up."""
        results = []
        for step in range(steps):
            inputs, targets = self.batch(target, step)
            results.append(reference(modules, inputs, targets, loss_fn=loss_fn, step=step))
        return results


_SMALL_DEMO = Model(GptConfig(sequence_length=8, layers=8, width=16, heads=2), microbatches=6)
_SMALL_LARGE = Model(
    GptConfig(vocabulary=64, sequence_length=16, layers=4, width=32, heads=4),
    torch.bfloat16,
    rows=1,
    microbatches=4,
    tolerance=3e-2,
)

#: The demo's model: on a GPU as it is, elsewhere smaller.
DEMO = {"cuda": Model(GptConfig(layers=8)), "stub": _SMALL_DEMO, "double": _SMALL_DEMO}
#: One of a size that people train.
LARGE = {
    "cuda": Model(
        GptConfig(vocabulary=8192, sequence_length=1024, layers=4, width=4096, heads=32),
        torch.bfloat16,
        rows=1,
        tolerance=3e-2,
    ),
    "stub": _SMALL_LARGE,
    "double": _SMALL_LARGE,
}


def placed(modules: Sequence[nn.Module], stages: int, layout: Layout = "looped") -> list[list[nn.Module]]:
    """The modules of all virtual stages, in order, as the chunks of each stage."""
    placement = Placement(stages, len(modules) // stages, layout)
    return [[modules[v] for v in placement.virtual_stages(stage)] for stage in range(stages)]


def worst_difference(actual: Sequence[nn.Module], expected: Sequence[nn.Module]) -> float:
    """The largest difference between two gradients of one parameter, relative to the expected one's norm."""
    worst = 0.0
    for ours, theirs in zip(actual, expected, strict=True):
        for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert left.grad is not None
            assert right.grad is not None
            difference = (left.grad.double() - right.grad.double()).norm() / right.grad.double().norm()
            if not difference <= worst:  # NaN too
                worst = float(difference)
    return worst


def have_same_bits(actual: Sequence[nn.Module], expected: Sequence[nn.Module]) -> bool:
    """Whether all gradients are equal to the last bit."""
    return all(
        left.grad is not None and right.grad is not None and torch.equal(left.grad, right.grad)
        for ours, theirs in zip(actual, expected, strict=True)
        for left, right in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
