"""Outputs that a module writes after it returned them: sent as returned, or an error naming the module."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from runtime.toys import TOLERANCE, WIDTH, data, largest_difference, loss_fn
from torch import Tensor, nn

import rrfp
from rrfp.testing.reference import reference

BATCH = data(6, ragged=False)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()


class Counted(Layer):
    """Returns how often it was called, from a buffer or a plain attribute."""

    calls: Tensor

    def __init__(self, *, buffer: bool, view: bool = False) -> None:
        super().__init__()
        calls = torch.zeros(1, dtype=torch.float64)
        self.register_buffer("calls", calls) if buffer else setattr(self, "calls", calls)
        self._view = view

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.calls.add_(1)
        return self.linear(x), self.calls.detach()[None].mT if self._view else self.calls


class Head(Layer):
    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        output: Tensor = self.linear(x) * factor
        return output


class Reading(Layer):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        return output


class Filled(Layer):
    """Returns the same memory for every microbatch, filled anew."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.filled = torch.zeros(rows, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.filled = self.filled.detach()
        self.filled.copy_(self.linear(x))
        return self.filled


def run(modules: Any, *, trains: bool = True, **options: Any) -> Any:
    with rrfp.local(modules, loss_fn=loss_fn, **options).blocking() as pipe:
        return (pipe.step if trains else pipe.evaluate)(BATCH.inputs, BATCH.targets)


over_all = pytest.mark.parametrize("transport", ["inproc", "shm", "zmq", "auto"])
both_modes = pytest.mark.parametrize("trains", [True, False], ids=["step", "evaluate"])
#: On two ranks, or as two chunks of one.
layouts = pytest.mark.parametrize("chunked", [False, True], ids=["ranks", "chunks"])


@over_all
@pytest.mark.parametrize("view", [False, True])
def test_a_returned_buffer_arrives_as_it_was_returned(transport: str, view: bool) -> None:
    modules = [Counted(buffer=True, view=view), Head()]
    expected = copy.deepcopy(modules)
    result = run(modules, transport=transport)
    wanted = reference(expected, BATCH.inputs, BATCH.targets, loss_fn=loss_fn)
    assert result.loss == pytest.approx(wanted.loss, rel=TOLERANCE)
    assert largest_difference(modules, expected) < TOLERANCE


@both_modes
@layouts
def test_so_does_it_between_chunks_and_in_an_evaluation(trains: bool, chunked: bool) -> None:
    modules = [Counted(buffer=True), Head()]
    expected = copy.deepcopy(modules)
    result = run([modules] if chunked else modules, trains=trains)
    wanted = reference(expected, BATCH.inputs, BATCH.targets, loss_fn=loss_fn)
    assert result.loss == pytest.approx(wanted.loss, rel=TOLERANCE)


@over_all
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_write_into_a_returned_attribute_names_its_module(transport: str, deterministic: bool) -> None:
    with pytest.raises(rrfp.errors.PipelineAborted) as raised:
        run([Counted(buffer=False), Head()], transport=transport, deterministic=deterministic)
    assert (
        "task F1@0: StageError: Counted on virtual stage 0 wrote in F1@0 into tensor [1] that it had returned in F0@0, "
        in str(raised.value)
    )
    assert "return a clone (x.clone())" in str(raised.value)


@both_modes
@layouts
def test_it_is_never_blamed_on_the_reader(trains: bool, chunked: bool) -> None:
    modules = [Counted(buffer=False, view=True), Head()]
    with pytest.raises(
        rrfp.errors.PipelineAborted, match=r"Counted on virtual stage 0 wrote in F1@0 into tensor \[1\]"
    ):
        run([modules] if chunked else modules, trains=trains)


@both_modes
@layouts
def test_one_memory_for_all_outputs_is_refused(trains: bool, chunked: bool) -> None:
    modules = [Filled(len(BATCH.inputs[0])), Reading()]
    with pytest.raises(rrfp.errors.PipelineAborted, match=r"Filled on virtual stage 0 wrote in F1@0 into the tensor"):
        run([modules] if chunked else modules, trains=trains)


class Kept(Layer):
    """Writes in its next call into what it received in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for last in self.last:
            last.add_(1)
        self.last = [x.detach()]
        output: Tensor = self.linear(x)
        return output


def test_a_reader_on_the_same_rank_that_writes_later_is_named() -> None:
    message = (
        r"Kept on virtual stage 1 wrote in F1@1 into the tensor that Linear on virtual stage 0 had returned in F0@0, "
    )
    with pytest.raises(rrfp.errors.PipelineAborted, match=message):
        run([[nn.Linear(WIDTH, WIDTH).double(), Kept()]], hint="f-priority", limit=len(BATCH.inputs))


def test_a_parameter_as_output_goes_without_a_copy() -> None:
    class Tied(Layer):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x), self.linear.weight

    class Reader(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            seen.append(weight.data_ptr())
            return x @ weight

    seen: list[int] = []
    modules = [Tied(), Reader()]
    expected = copy.deepcopy(modules)
    with rrfp.local([modules], loss_fn=loss_fn).blocking() as pipe:
        pipe.step(BATCH.inputs, BATCH.targets)
        with torch.no_grad():  # as an optimizer does, between steps
            modules[0].linear.weight.mul_(1.0)  # type: ignore[union-attr,operator]
        pipe.evaluate(BATCH.inputs, BATCH.targets)
    assert set(seen) == {modules[0].linear.weight.data_ptr()}  # type: ignore[union-attr,operator]
    reference(expected, BATCH.inputs, BATCH.targets, loss_fn=loss_fn)
    assert largest_difference(modules, expected) < TOLERANCE


def test_several_readers_of_a_part() -> None:
    class Merge(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return left + right

    graph = rrfp.Graph()
    source = graph.part("source", stages=[0])
    branches = {name: graph.part(name, stages=[0], reads={"x": source}) for name in ("left", "right")}
    graph.part("merge", stages=[0], reads=branches)
    parts: Mapping[str, nn.Module] = {
        "source": Filled(len(BATCH.inputs[0])),
        "left": Reading(),
        "right": Reading(),
        "merge": Merge(),
    }
    with (
        pytest.raises(rrfp.errors.PipelineAborted, match=r"Filled on virtual stage 0 wrote in F1@0 into the tensor"),
        rrfp.local([parts], loss_fn=loss_fn, graph=graph).blocking() as pipe,
    ):
        pipe.step({"source": BATCH.inputs}, BATCH.targets)


class Pair(NamedTuple):
    x: Tensor
    calls: Tensor


class Results(Layer):
    """A last module that returns its state."""

    state: Tensor

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        state = torch.zeros(1, dtype=torch.float64)
        self.register_buffer("state", state) if buffer else setattr(self, "state", state)

    def forward(self, x: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            self.state.add_(1)
        return {"out": [x], "pair": Pair(x, self.state)}


def test_results_of_an_evaluation_are_those_that_were_returned() -> None:
    with rrfp.local([nn.Identity(), Results(buffer=True)]).blocking() as pipe:
        outputs = pipe.evaluate(BATCH.inputs).outputs
    assert [output["pair"].calls.item() for output in outputs.values()] == [1, 2, 3, 4, 5, 6]
    with (
        pytest.raises(
            rrfp.errors.PipelineAborted,
            match=r"Results on virtual stage 1 wrote into the output of microbatch 0 after it had returned it",
        ),
        rrfp.local([nn.Identity(), Results(buffer=False)]).blocking() as pipe,
    ):
        pipe.evaluate(BATCH.inputs)


def test_results_that_are_inference_tensors_are_copied() -> None:
    class Frozen(Results):
        @torch.inference_mode()
        def forward(self, x: Tensor) -> dict[str, Any]:
            if not self.state.is_inference():
                self.state = torch.zeros_like(self.state)
            return super().forward(x)

    with rrfp.local([nn.Identity(), Frozen(buffer=False)]).blocking() as pipe:
        outputs = pipe.evaluate(BATCH.inputs).outputs
    assert [output["pair"].calls.item() for output in outputs.values()] == [1, 2, 3, 4, 5, 6]


@both_modes
def test_a_loss_that_is_written_later_is_refused(trains: bool) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss = torch.zeros((), dtype=torch.float64)

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.loss = self.loss.detach()
            return self.loss.copy_(loss_fn(output, target))

    modules = [nn.Linear(WIDTH, WIDTH).double() for _ in range(2)]
    message = r"Linear on virtual stage 1 wrote into the loss of microbatch 0 after it had returned it"
    with (
        pytest.raises(rrfp.errors.PipelineAborted, match=message),
        rrfp.local(modules, loss_fn=Loss()).blocking() as pipe,
    ):
        (pipe.step if trains else pipe.evaluate)(BATCH.inputs, BATCH.targets)


def test_an_inference_tensor_whose_writes_are_not_counted_is_copied() -> None:
    class Frozen(Counted):
        @torch.inference_mode()
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            if not self.calls.is_inference():
                self.calls = torch.zeros_like(self.calls)
            return super().forward(x)

    class Noting(nn.Module):
        def forward(self, x: Tensor, factor: Tensor) -> Tensor:
            factors.append(factor.item())
            return x * factor

    factors: list[float] = []
    run([Frozen(buffer=False), Noting()], trains=False)
    assert factors == [1, 2, 3, 4, 5, 6]
