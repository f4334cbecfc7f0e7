"""Gradients over replicas: sums and their order; real processes where collectives matter."""

from __future__ import annotations

import pytest
import torch
from compute import reduction_cases
from compute.gloo_ranks import GOOD, cases_of, outcomes
from compute.replica import REPLICAS
from fork_server import fork_server
from torch import nn

from rrfp.compute.gradients import layout as gradient_layout
from rrfp.compute.gradients.layout import ABSENT, checksum, encode, zeros
from rrfp.compute.gradients.reducer import buckets, shares
from rrfp.errors import StageError

__all__ = ["fork_server"]

CASES = cases_of(reduction_cases)


@pytest.fixture(scope="module")
def on_three_replicas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return outcomes("compute.reduction_cases", CASES, REPLICAS, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("case", CASES)
def test_on_three_replicas(case: str, on_three_replicas: dict[str, list[str]]) -> None:
    outcomes = on_three_replicas[case]
    assert outcomes == [GOOD] * REPLICAS, "\n".join(outcomes)


def test_deeper_chunks_come_first_and_what_chunks_share_comes_with_the_last() -> None:
    shared, own = nn.Linear(2, 2, bias=False), nn.Linear(3, 3)
    found = shares({0: shared, 4: nn.Sequential(shared, own, own), 2: shared})
    assert list(found) == [4, 2, 0]
    assert [name for name, _ in found[4]] == [
        "parameter '1.weight' of virtual stage 4",
        "parameter '1.bias' of virtual stage 4",
    ]
    assert found[2] == []
    assert [parameter for _, parameter in found[0]] == [shared.weight]


def test_buckets_hold_one_dtype_and_are_full_but_not_more() -> None:
    tensors = [torch.zeros(size, dtype=dtype) for size, dtype in [(2, torch.float64), (3, torch.float32)] * 3]
    tensors += [torch.zeros(0), torch.zeros(100, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
    found = list(buckets(tensors, most_bytes=32))
    assert [[tensor.nbytes for tensor in bucket] for bucket in found] == [[16, 16], [12, 12], [16], [800], [12], [8]]
    assert sum(map(len, found)) == len(tensors) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
def test_zeros_have_the_layout_of_another_replicas_gradient(dtype: torch.dtype) -> None:
    there, here = nn.Parameter(torch.ones(2, 3, dtype=dtype)), nn.Parameter(torch.ones(2, 3, dtype=dtype))
    assert encode(there, "w") == ABSENT
    there.grad = torch.ones_like(there)
    made = zeros(here, encode(there, "w"))
    assert (made.dtype, made.shape, made.requires_grad) == (dtype, there.shape, False)
    assert not made.any()
    there.requires_grad_(False)
    assert encode(there, "w") == ABSENT


def test_a_gradient_that_nobody_can_add_is_refused_by_name() -> None:
    parameter = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn))
    parameter.grad = torch.zeros(2).to(torch.float8_e4m3fn)
    with pytest.raises(StageError, match=r"^w has a gradient of torch\.float8_e4m3fn, must be one of: torch\.float32"):
        encode(parameter, "w")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.complex64, torch.bool])
def test_a_checksum_depends_on_the_bits_alone(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on where they lie in memory; and each bit counts."""
    monkeypatch.setattr(gradient_layout, "_SLICE_BYTES", 16)
    memory = torch.randint(0, 2, (40,), generator=torch.Generator().manual_seed(0)).to(dtype)
    values = memory[1:38]
    found = checksum(values)
    spread = torch.zeros(37, 2).to(dtype)
    spread[:, 0] = values
    assert checksum(values.clone()) == found == checksum(spread[:, 0])
    for index in (0, 20, 36):
        other = values.clone()
        other[index : index + 1].view(torch.uint8)[0] ^= 1
        assert checksum(other) != found
