"""What happens to gradients on three replicas; every function runs on each of them, in a process of its own."""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from compute.replica import REPLICAS, Replica, Weights, assert_close, of_all, of_rank, reduce_once
from runtime.host_device import HostDevice
from torch import nn

import rrfp
from rrfp import timeouts
from rrfp.compute.gradients import reducer as gradient_buckets
from rrfp.compute.gradients.reducer import GradientReducer
from rrfp.errors import StageError
from rrfp.model.mesh import Mesh


def mixed() -> Any:
    """Parameters of several dtypes, sizes and strides, some of which begin or end within a word of memory."""
    module = nn.Module()
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    module.register_parameter("wide", nn.Parameter(values.double().view(8, 8).t()))
    module.register_parameter("odd", nn.Parameter(values[3:10]))
    module.register_parameter("low", nn.Parameter(values.bfloat16()[1:]))
    module.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    module.register_parameter("complex", nn.Parameter(torch.view_as_complex(values[:6].view(3, 2).clone())))
    return module


def one_more_bit(parameter: nn.Parameter, does: bool) -> None:
    """Change the last bit of the last value."""
    parameter.data[-1:].view(torch.int16).bitwise_xor_(int(does))


# Cases.


def chunks_may_finish_in_another_order_on_every_replica(rank: int) -> None:
    modules = {v: Weights((v + 1, 3)) for v in (0, 2, 4)}
    replica = Replica(rank, modules)
    replica.open()
    for module in modules.values():
        replica.backward(module)
    replica.sum(*[(0, 2, 4), (2, 4, 0), (4, 2, 0)][rank])
    for module in modules.values():
        assert_close(module.w0.grad, of_all(module.w0))


def zeros_stand_in_where_a_replica_has_no_gradient(rank: int) -> None:
    module = Weights((2, 3), (4,), (5,))
    if rank == 2:
        module.w0.grad = torch.full((2, 3), 2.0, dtype=torch.float64)
    if rank < 2:
        module.w1.grad = torch.full((4,), 1.0 + rank, dtype=torch.float64)
    reduce_once(module, rank)
    assert_close(module.w0.grad, torch.full((2, 3), 2.0, dtype=torch.float64))
    assert_close(module.w1.grad, torch.full((4,), 3.0, dtype=torch.float64))
    assert module.w2.grad is None  # no replica has it


def after_its_end_no_collective_that_still_succeeds_makes_a_gradient(rank: int) -> None:
    class Closes(GradientReducer):
        """Is closed while it waits for the layouts of the others."""

        def _largest(self, numbers: list[int]) -> list[int]:
            found = super()._largest(numbers)
            self.close()
            return found

    module = Weights((2, 3))
    with patch("compute.replica.GradientReducer", Closes):
        replica = Replica(rank, module)
    replica.open()
    if rank == 2:
        replica.backward(module)
    with pytest.raises(StageError, match="the pipeline was left"):
        replica.sum(0)
    assert (module.w0.grad is None) == (rank != 2)


def reducing_every_one_of_several_steps_counts_each_gradient_once(rank: int) -> None:
    module = Weights((3, 4))
    replica = Replica(rank, module)
    for number in range(3):
        replica.step(number)
        assert_close(module.w0.grad, of_all(module.w0, *range(number + 1)))


def reducing_the_last_of_several_steps_is_the_same(rank: int) -> None:
    module = Weights((3, 4))
    replica = Replica(rank, module)
    for number in range(2):
        replica.step(2 * number, reduces=False)
        replica.step(2 * number + 1)
        assert_close(module.w0.grad, of_all(module.w0, *range(2 * number + 2)))


def what_is_done_to_the_total_between_steps_stays_done(rank: int) -> None:
    def halve(module: nn.Module) -> None:
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad = 0.5 * parameter.grad

    def clip(module: nn.Module) -> None:
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.25)

    keep_zeros = partial(nn.Module.zero_grad, set_to_none=False)
    changes = ((nn.Module.zero_grad, 0.0), (keep_zeros, 0.0), (clip, 0.25), (halve, 0.5))
    for change, kept in changes:
        module = Weights((3, 4))
        replica = Replica(rank, module)
        replica.step(0)
        change(module)
        replica.step(1)
        assert_close(module.w0.grad, kept * of_all(module.w0, 0) + of_all(module.w0, 1))


def a_frozen_parameter_keeps_its_gradient_until_it_thaws(rank: int) -> None:
    module = Weights((3,), (2,))
    replica = Replica(rank, module)
    replica.step(0)
    module.w1.requires_grad_(False)
    replica.step(1)
    assert_close(module.w1.grad, of_all(module.w1, 0))
    module.w1.requires_grad_(True)
    replica.step(2)
    assert_close(module.w0.grad, of_all(module.w0, 0, 1, 2))
    assert_close(module.w1.grad, of_all(module.w1, 0, 2))


def a_parameter_of_two_chunks_is_summed_once_with_the_later_one(rank: int) -> None:
    module = Weights((3,))
    replica = Replica(rank, {0: module, 1: nn.ModuleList([module, Weights((2,))])})
    replica.open()
    replica.backward(module)
    replica.sum(*((0, 1) if rank else (1, 0)))
    assert_close(module.w0.grad, of_all(module.w0))


def in_order_the_bits_are_those_of_the_sum_by_replica(rank: int) -> None:
    module = Weights((7, 5), (40,))
    terms = [1e16, 1.0 / 3.0, -1e16]  # another order gives another sum
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, terms[rank]) + of_rank(parameter, rank)
    with patch.object(gradient_buckets, "BUCKET_BYTES", 128):  # several pieces of 16 numbers
        reduce_once(module, rank, deterministic=True)
    for parameter in module.parameters():
        first, *others = (torch.full_like(parameter, terms[r]) + of_rank(parameter, r) for r in range(REPLICAS))
        for other in others:
            first = first + other
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, first)


def gradients_of_any_dtype_and_stride_are_summed(rank: int) -> None:
    module = nn.Module()
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
    for dtype in dtypes:
        module.register_parameter(f"of_{str(dtype)[6:]}", nn.Parameter(torch.zeros(3, 4, dtype=dtype)))
    module.register_parameter("empty", nn.Parameter(torch.zeros(0, 4)))
    module.register_parameter("turned", nn.Parameter(torch.zeros(4, 3).t()))
    module.register_parameter("alone", nn.Parameter(torch.zeros(64, dtype=torch.float64)[::2]))
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1 + rank)
    with patch.object(gradient_buckets, "BUCKET_BYTES", 200):
        reduce_once(module, rank)
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full_like(parameter, 6))


def a_sparse_gradient_is_refused_by_name(rank: int) -> None:
    module = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    module(torch.tensor([1])).sum().backward()
    with pytest.raises(StageError, match=r"parameter '0\.weight' of virtual stage 0 has a gradient of layout .*sparse"):
        reduce_once(module, rank)


def models_that_differ_are_refused(rank: int) -> None:
    module = Weights((2, 3) if rank else (3, 2))
    with pytest.raises(StageError, match="replicas of this stage differ in the names, shapes or dtypes"):
        reduce_once(module, rank)
    module = Weights((3, 2), (2,))
    module.w1.data.fill_(rank)
    with pytest.raises(StageError, match=r"'w1' of virtual stage 0 has other values on .* start equal"):
        reduce_once(module, rank)
    module = Weights((3, 2), (2,))
    module.w1.data.fill_(rank == 1)
    text = (
        r"^parameter 'w1' of virtual stage 0 has other values on replica 1 than on replica 0 and replica 2: must start"
    )
    with pytest.raises(StageError, match=text):
        reduce_once(module, rank)


def parameters_that_drift_apart_are_found_where_replicas_compare_them(rank: int) -> None:
    """Sums 1 (of course), 4, 7, ...; those in steps that sum nothing do not count."""
    module = mixed()
    replica = Replica(rank, module, check_every=3)
    for number in range(8):
        replica.step(2 * number, reduces=False)
        replica.step(2 * number + 1)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.125)  # as an optimizer does on all
    one_more_bit(module.low, rank == 2)
    replica.step(16)
    text = r"^parameter 'low' of virtual stage 0 has other values on replica 2 than on replica 0 and replica 1: must be"
    with pytest.raises(StageError, match=text):
        replica.step(17)


def without_comparisons_replicas_may_drift_apart(rank: int) -> None:
    module = mixed()
    replica = Replica(rank, module)
    for number in range(4):
        replica.step(number)
        one_more_bit(module.low, rank == 2)


def what_is_frozen_on_one_replica_only_is_found_and_on_all_is_not_compared(rank: int) -> None:
    module = mixed()
    replica = Replica(rank, module, check_every=1)
    replica.step(0)
    module.low.requires_grad_(False)
    one_more_bit(module.low, rank == 2)
    replica.step(1)
    module.odd.requires_grad_(rank != 0)
    text = r"^parameter 'odd' of virtual stage 0 is frozen on replica 0 and not on replica 1 and replica 2: must be the"
    with pytest.raises(StageError, match=text):
        replica.step(2)


def gradients_of_another_dtype_on_one_replica_are_refused(rank: int) -> None:
    module = Weights((2, 3), (4,))
    module.w1.grad_dtype = None
    module.w1.grad = torch.zeros(4, dtype=torch.float32 if rank == 1 else torch.float64)
    with pytest.raises(StageError, match="'w1' of virtual stage 0 has gradients of different dtypes or placements"):
        reduce_once(module, rank)


def a_lane_is_fenced_by_each_step_that_sums_and_adopts_the_gradients(rank: int) -> None:
    module = Weights((3,), (2,))
    replica = Replica(rank, module)
    replica.step(0, reduces=False)
    assert not replica.lane.fences
    replica.step(1)
    assert len(replica.lane.fences) == 1
    adopted = {tensor.data_ptr() for tensor in replica.lane.adopted}
    assert adopted == {parameter.grad.data_ptr() for parameter in module.parameters() if parameter.grad is not None}
    assert len(adopted) == 2


def a_rank_with_a_device_sums_on_a_stream_of_it(rank: int) -> None:
    device = HostDevice()
    topology = rrfp.Topology.at(rank, Mesh((("pp", 1), ("dp", REPLICAS))))
    rrfp.Pipeline(nn.Linear(2, 2), topology=topology, device=device, loss_fn=nn.functional.mse_loss)
    assert device.num_streams == 1


def zy_the_error_of_a_broken_connection_is_kept_back_for_a_while(rank: int) -> None:
    """Whoever knows why it broke may say so first."""
    group = dist.new_group([0, 1])
    dist.barrier()  # both have connected
    if rank == 1:
        dist.destroy_process_group(group)
    if rank == 0:
        replica = Replica(rank, Weights((2,)), group)
        replica.open()
        began = time.monotonic()
        with patch.object(timeouts, "COLLECTIVE_ERROR_S", 0.3), pytest.raises(RuntimeError, match="gloo"):
            replica.sum(0)
        assert time.monotonic() - began > 0.3


def zz_closing_does_not_wait_for_a_collective_that_hangs(rank: int) -> None:
    """The last one: replica 0 is left alone in it, and its process ends all the same."""
    if rank == 0:
        replica = Replica(rank, Weights((2,)))
        replica.open()
        began = time.monotonic()
        replica.leave(0)
        assert time.monotonic() - began < 1
