"""Cases for 4 ranks over gloo: a GradScaler with replicas, and with sharded parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from pipeline.scaled_training import Course, batch, expected, loss_fn, model, new_scaler, sgd, trained
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rrfp


def everyone(value: Any) -> list[Any]:
    """The values of all ranks."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def two_replicas_skip_the_steps_of_one_process(rank: int) -> None:
    """The first replica alone has overflows; gradients that accumulate are summed in the last step."""
    spikes = {(2, 1, 3), (6, 0, 0)}
    place = rrfp.Topology.from_env(dims={"pp": 2, "dp": 2})
    for accumulate in (1, 2):
        wanted = expected(2, new_scaler(), spikes, accumulate=accumulate, replicas=2)
        assert wanted.skipped
        modules, all_modules = [model(2)[place.stage]], model(2)
        with rrfp.Pipeline(modules[0], topology=place, loss_fn=loss_fn).blocking() as pipe:
            training: dict[str, Any] = {"stages": 2, "accumulate": accumulate, "replica": place.replica}
            course = trained(pipe, modules, [sgd(modules)], new_scaler(), spikes, **training)
        assert (course.scales, course.skipped) == (wanted.scales, wanted.skipped)
        first = sum(len(list(module.parameters())) for module in all_modules[: place.stage])
        for ours, theirs in zip(course.values, wanted.values[first:], strict=False):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


class Sharded(nn.Module):
    """Two layers that are sharded, and a parameter that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.factor = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(torch.tanh(self.up(x)))
        return output * self.factor


def an_overflow_in_one_shard_is_skipped_by_all(rank: int) -> None:
    """Compared with one process; a shard of one rank gets an inf in the second step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    place = rrfp.Topology.from_mesh(mesh)
    torch.manual_seed(0)
    theirs = [Sharded() for _ in range(2)]
    torch.manual_seed(0)
    own = [Sharded() for _ in range(2)][place.stage]
    parallelize_module(own, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    scaler, scaler_there = new_scaler(growth_interval=100), new_scaler(growth_interval=100)
    optimizer, optimizer_there = sgd([own]), sgd(theirs)
    course = Course()
    with rrfp.Pipeline(own, mesh=mesh, loss_fn=loss_fn).blocking() as pipe:
        pipe.scale(scaler)
        for step in range(4):
            pipe.step(*batch(step))
            for x, target in zip(*batch(step), strict=True):
                scaler_there.scale(loss_fn(theirs[1](theirs[0](x)), target) / 4).backward()  # type: ignore[no-untyped-call]
            if step == 1:
                for parameter in (theirs[1].up.weight, *([own.up.weight] if rank == 3 else [])):
                    gradient: Any = parameter.grad
                    getattr(gradient, "_local_tensor", gradient)[0, 0] = torch.inf
            for each, stepper in ((scaler, optimizer), (scaler_there, optimizer_there)):
                each.unscale_(stepper)
                each.step(stepper)
            scaler_there.update()
            course.update(scaler, step)
            optimizer.zero_grad()
            optimizer_there.zero_grad()
    assert everyone((course.scales, course.skipped)) == [([2.0**12, 2.0**11, 2.0**11, 2.0**11], [1])] * 4
    for ours, wanted in zip(own.parameters(), theirs[place.stage].parameters(), strict=True):
        whole: Any = ours.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        torch.testing.assert_close(whole, wanted.detach(), rtol=1e-4, atol=1e-6)
