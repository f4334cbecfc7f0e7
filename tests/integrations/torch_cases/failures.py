"""Stages that fail, and how a schedule ends."""

from __future__ import annotations

import gc
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from integrations.torch_parts import WIDTH, Block, Rank, batch, loss_fn
from torch import Tensor, nn
from torch.distributed.pipelining._utils import PipeliningMetadataError

import rrfp


class Writes(nn.Module):
    """Writes into its input, where no gradient forbids it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.add_(1)
        output: Tensor = self.linear(x)
        return output


def a_write_into_a_received_tensor_is_named() -> None:
    rank = Rank(1, 2, make=Writes)
    x, y = batch(0, 4)
    args, kwargs = rank.arguments(x, y, [])
    with pytest.raises(rrfp.PipelineAborted, match="StageError: Writes on stage 1 wrote into its input 0"):
        rank.schedule.step(*args, **kwargs)


class Reuses(Block):
    """Returns the same memory for every microbatch."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        output = super().forward(x, scale)
        self.output = getattr(self, "output", torch.empty_like(output)).detach()
        return self.output.copy_(output)


def a_write_into_a_returned_tensor_is_named() -> None:
    rank = Rank(1, 4, make=Reuses)
    args, kwargs = rank.arguments(*batch(0, 8), [])
    match = r"StageError: Reuses on virtual stage 0 wrote in F1@0 into tensor .* it had returned in F0@0"
    with pytest.raises(rrfp.PipelineAborted, match=match):
        rank.schedule.step(*args, **kwargs)


class Counts(Block):
    """Returns a buffer that its next call writes, and counts on the last rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(2, 1))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        output = super().forward(x, scale)
        if dist.get_rank() + 1 < dist.get_world_size():
            return output
        self.last: Tensor
        self.last = self.last.detach()
        return self.last.copy_(output.mean(tuple(range(1, output.ndim)))[:, None])


def a_buffer_returned_by_the_last_stage_is_named() -> None:
    """Merged, all microbatches would have the values of the last one."""
    for call in ("step", "eval"):
        rank = Rank(1, 4, make=Counts, loss=lambda output, target: output.mean())
        args, kwargs = rank.arguments(*batch(0, 8), [])
        match = r"StageError: Counts on stage \d wrote into the output of microbatch 0 after it had returned it: return"
        with pytest.raises(rrfp.PipelineAborted, match=match):
            getattr(rank.schedule, call)(*args, **kwargs)


def a_loss_that_is_written_later_is_named() -> None:
    total = torch.zeros(())

    def add_up(output: Tensor, target: Tensor) -> Tensor:
        nonlocal total
        total = total.detach()
        return total.add_(loss_fn(output, target))

    rank = Rank(1, 4, loss=add_up)
    args, kwargs = rank.arguments(*batch(0, 8), [])
    match = r"StageError: Block on stage \d, or loss_fn, wrote into the loss of microbatch 0 after it had returned it"
    with pytest.raises(rrfp.PipelineAborted, match=match):
        rank.schedule.step(*args, **kwargs, return_outputs=False)


class Fails(Block):
    """Raises in the third microbatch of a step that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.calls += 1
        if self.calls == 4 and dist.get_rank() == 1:  # the first call infers shapes
            raise ValueError("enough")
        return super().forward(x, scale)


def a_stage_that_raises_is_named_on_all_ranks() -> None:
    rank = Rank(1, 4, make=Fails)
    x, y = batch(0, 8)
    args, kwargs = rank.arguments(x, y, [])
    with pytest.raises(rrfp.PipelineAborted) as failure:
        rank.schedule.step(*args, **kwargs)
    assert failure.value.origin.stage == 1
    assert str(failure.value.origin.task).startswith("F")
    with pytest.raises(rrfp.RrfpError, match="ended with PipelineAborted; build a new one"):
        rank.schedule.step(*args, **kwargs)
    rank.schedule.close()
    again = Rank(1, 4)
    again.steps(1)
    again.schedule.close()


class Wider(Block):
    """Returns another dtype than it did when torch inferred it, on the first rank, from the third microbatch on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.calls += 1
        output = super().forward(x, scale)
        return output.float() if self.calls == 4 and dist.get_rank() == 0 else output


def errors_have_the_types_of_torch_on_all_ranks() -> None:
    """What catches those of torch's schedules catches these."""
    for make, kind in ((Wider, PipeliningMetadataError), (Fails, RuntimeError)):
        rank = Rank(1, 4, make=make)
        for stage in rank.stages:
            stage._runtime_validate = True  # as at torch's debug level DETAIL
        args, kwargs = rank.arguments(*batch(0, 8), [])
        with pytest.raises(kind, match="aborted by stage") as failure:
            rank.schedule.step(*args, **kwargs)
        assert isinstance(failure.value, rrfp.PipelineAborted)
        assert isinstance(failure.value, PipeliningMetadataError) is (make is Wider)
        assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)
        assert failure.value.origin.stage == (0 if make is Wider else 1)


class FailsInBackward(torch.autograd.Function):
    """Raises in the backward of a step's first microbatch."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        FailsInBackward.calls += 1
        if FailsInBackward.calls > 1 and dist.get_rank() == 1:  # the first call infers shapes
            raise LookupError("of the backward")
        return gradients[0]


class Differentiated(Block):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        output: Tensor = FailsInBackward.apply(super().forward(x, scale))  # type: ignore[no-untyped-call]
        return output


def the_error_of_a_module_passes_unwrapped() -> None:
    """Its type and text reach all ranks; on its own rank the last line is its place in the module."""
    cases: tuple[tuple[type[Block], bool, str, str], ...] = (
        (Fails, False, "F", "ValueError: enough; "),
        (Differentiated, False, "B", "LookupError: of the backward; "),
        (Differentiated, True, "B", "LookupError: of the backward"),
    )
    for make, split, kind, text in cases:
        FailsInBackward.calls = 0
        rank = Rank(1, 4, make=make, split=split)
        args, kwargs = rank.arguments(*batch(0, 8), [])
        with pytest.raises(rrfp.PipelineAborted) as failure:
            rank.schedule.step(*args, **kwargs)
        origin = failure.value.origin
        assert str(origin.task).startswith(kind)
        assert origin.cause.startswith(text), origin.cause
        assert ("Tensor(" in origin.cause) is not split  # torch's description of the arguments
        if dist.get_rank() == 1:
            assert type(failure.value.__cause__).__name__ == text.partition(":")[0]
            assert f"{__file__}:" in failure.value.__notes__[-1]
        else:
            assert failure.value.__cause__ is None


def _threads(*, ending: bool) -> list[str]:
    """The threads of RRFP in this process; those that end are waited for."""
    own = [thread for thread in threading.enumerate() if thread.name.startswith("rrfp")]
    for thread in own if ending else ():
        thread.join(10)
    return [thread.name for thread in own if thread.is_alive()]


def a_schedule_ends_with_its_last_reference() -> None:
    gc.collect()
    assert _threads(ending=True) == []
    rank = Rank(1, 2)
    rank.steps(1)
    assert _threads(ending=False)
    rank.schedule = None  # type: ignore[assignment]
    assert _threads(ending=True) == []
    rank = Rank(1, 2)
    rank.steps(1)
    rank.schedule.close()
    assert _threads(ending=True) == []
    rank.schedule.close()
    with pytest.raises(rrfp.RrfpError, match="this schedule was closed; build a new one"):
        rank.steps(1)
