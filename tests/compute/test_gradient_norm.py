"""Norms of gradients in one process, and clipping by them; tests of DTensors and replicas are elsewhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rrfp
from rrfp.compute.gradients.norm import clip, combined_norm, local_norm
from rrfp.errors import ConfigError, ProtocolError, StageError
from rrfp.model.mesh import Mesh
from rrfp.runtime.grad_clipping import Clipping, GradientHolder

NORM_TYPES = [2.0, 1.0, 0.5, 3.0, math.inf]


def with_gradients(seed: int = 0, *, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> nn.Linear:
    """A layer whose gradients are the same for the same seed; its bias has none."""
    module = nn.Linear(5, 3).to(dtype)
    module.weight.grad = scale * torch.randn(3, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return module


def gradients(*modules: nn.Module) -> list[Tensor]:
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize(("max_norm", "is_scaled"), [(0.5, True), (1e6, False), (math.inf, False), (0.0, True)])
def test_gradients_are_clipped_as_torch_does_it(norm_type: float, max_norm: float, is_scaled: bool) -> None:
    ours, theirs = ([with_gradients(0), with_gradients(1)] for _ in range(2))
    before = [gradient.clone() for gradient in gradients(*ours)]
    expected = nn.utils.clip_grad_norm_([p for m in theirs for p in m.parameters()], max_norm, norm_type)
    norm = local_norm(dict(enumerate(ours)), norm_type)
    clip(dict(enumerate(ours)), max_norm, norm)
    assert norm == pytest.approx(float(expected), rel=1e-14)
    for mine, wanted, original in zip(gradients(*ours), gradients(*theirs), before, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-13, atol=0)
        assert torch.equal(mine, original) is not is_scaled


def test_half_precision_is_summed_in_double() -> None:
    """In float16 the squares alone would overflow."""
    module = with_gradients(scale=1000.0, dtype=torch.float16)
    exact = float(gradients(module)[0].double().norm())
    assert local_norm({0: module}) == pytest.approx(exact, rel=1e-14)


def test_complex_gradients_have_the_norm_of_their_sizes() -> None:
    module = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex128))])
    parameter = next(module.parameters())
    parameter.grad = torch.tensor([3 + 4j, 12j], dtype=torch.complex128)
    assert [local_norm({0: module}, p) for p in (1.0, 2.0, math.inf)] == [17.0, 13.0, 12.0]


def test_what_is_shared_counts_once_and_is_scaled_once() -> None:
    module = with_gradients()
    chunks = {0: module, 1: nn.Sequential(module), 2: nn.Sequential(module, module)}
    norm = local_norm(chunks)
    assert norm == pytest.approx(local_norm({0: module}), rel=1e-15)
    clip(chunks, norm / 2, norm)
    assert local_norm({0: module}) == pytest.approx(norm / 2, rel=1e-5)


def test_what_is_skipped_is_scaled_but_does_not_count() -> None:
    skipped, counted = with_gradients(0), with_gradients(1)
    modules = {0: skipped, 1: counted}
    norm = local_norm(modules, skip=[skipped.weight])
    assert norm == local_norm({1: counted})
    before = gradients(skipped)[0].clone()
    clip(modules, norm / 2, norm)
    torch.testing.assert_close(gradients(skipped)[0], before / 2, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("rank", "counts"), [(0, True), (1, False), (2, False), (3, False)])
def test_plain_gradients_count_on_the_first_member_of_the_first_replica(rank: int, counts: bool) -> None:
    topology = rrfp.Topology.at(rank, Mesh((("pp", 1), ("dp", 2), ("tp", 2))))
    module = with_gradients()
    assert local_norm({0: module}, topology=topology) == (local_norm({0: module}) if counts else 0.0)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_not_hidden(norm_type: float, value: float) -> None:
    module = with_gradients()
    gradients(module)[0][1, 2] = value
    norm = local_norm({0: module, 1: with_gradients(1)}, norm_type)
    assert math.isnan(norm) if math.isnan(value) else norm == math.inf
    clip({0: module}, math.inf, norm)
    assert not gradients(module)[0].isnan()[0].any()
    clip({0: module}, 1.0, norm)
    assert math.isnan(gradients(module)[0][1, 2])


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=5), min_size=1, max_size=5), st.sampled_from(NORM_TYPES))
def test_the_norm_of_norms_is_the_norm(parts: list[list[float]], norm_type: float) -> None:
    def norm(values: list[float]) -> float:
        if math.isinf(norm_type):
            return max(map(abs, values), default=0.0)
        total: float = sum(abs(value) ** norm_type for value in values) ** (1 / norm_type)
        return total

    everything = [value for part in parts for value in part]
    assert combined_norm([norm(part) for part in parts], norm_type) == pytest.approx(norm(everything), rel=1e-9)


def test_no_gradients_have_the_norm_zero() -> None:
    assert local_norm({0: nn.Linear(1, 1)}) == 0.0
    assert Clipping(GradientHolder({0: nn.Linear(1, 1)}), 1.0).clip([]) == 0.0


def test_entries_of_a_sparse_gradient_for_one_index_count_as_one() -> None:
    module = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    module(torch.tensor([1, 1, 3])).sum().backward()
    assert local_norm({7: module}) == pytest.approx(10**0.5)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_gradient_in_another_layout_is_refused_by_name() -> None:
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.eye(2).to_sparse_csr())
    module.weight.grad = torch.eye(2).to_sparse_csr()
    with pytest.raises(StageError, match=r"parameter 'weight' of virtual stage 7 has a gradient of layout .*csr"):
        local_norm({7: module})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0,), r"^max_norm is -1\.0, must be a number >= 0$"),
        ((math.nan,), r"^max_norm is nan, must be"),
        (("1",), r"^max_norm is '1', must be"),
        ((True,), r"^max_norm is True, must be"),
        ((1.0, 0), r"^norm_type is 0, must be a number above 0, or inf$"),
        ((1.0, -2.0), r"^norm_type is -2\.0, must be"),
        ((1.0, math.nan), r"^norm_type is nan, must be"),
        ((1.0, 2.0, 1), r"^error_if_nonfinite is 1, must be True or False$"),
        ((1.0, 2.0, True, "no"), r"^foreach is 'no', must be True or False, or None$"),
    ],
)
def test_impossible_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Clipping(GradientHolder({0: with_gradients()}), *arguments)


def test_ranks_that_ask_for_different_things_are_all_told_and_nothing_is_scaled() -> None:
    modules = [with_gradients(0), with_gradients(1)]
    before = [gradient.clone() for gradient in gradients(*modules)]
    clippings = [Clipping(GradientHolder({0: module}), 0.1 + n) for n, module in enumerate(modules)]
    answers = [clipping.share() for clipping in clippings]
    for clipping in clippings:
        with pytest.raises(ConfigError, match=r"are \(0\.1, 2, False\) and \(1\.1, 2, False\) on diff"):
            clipping.clip(answers)
    assert all(map(torch.equal, gradients(*modules), before))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x01", b"\x92\x01\x02", b"\x94\xa1x\x01\xc2\x02"])
def test_an_answer_that_cannot_be_read_is_a_protocol_error(data: bytes) -> None:
    clipping = Clipping(GradientHolder({0: with_gradients()}), 1.0)
    with pytest.raises(ProtocolError, match="share of the gradient norm cannot be read"):
        clipping.clip([clipping.share(), data])


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the values that the host reads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_host_waits_once_however_many_parameters_there_are() -> None:
    modules = {v: with_gradients(v, dtype=dtype) for v, dtype in enumerate([torch.float64, torch.float32] * 8)}
    with Waits() as waits:
        norm = local_norm(modules)
    assert waits.count <= 1  # of the norm of all norms, on the CPU
    each = [float(torch.linalg.vector_norm(g, 2.0, dtype=torch.float64)) for g in gradients(*modules.values())]
    assert norm == combined_norm(each)  # to the last bit, in the order of parameters
