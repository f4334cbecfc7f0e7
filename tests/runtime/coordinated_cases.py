"""Cases for 4 ranks: two stages by two ranks with data of their own, which gather features or must stay equal."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import rrfp
from rrfp.errors import ConfigError, PipelineAborted
from rrfp.pipeline.faces import BlockingPipeline

STAGES = DATA = 2
WIDTH = 6
DIMS = {"pp": STAGES, "dp": DATA}
#: Both ranks of a stage run one order, and gradients are summed over them.
JOINED: dict[str, Any] = {"dims": DIMS, "coordinate": ("tp", "dp"), "reduce": ("dp",)}
#: Rows of each microbatch, the same on both ranks: features are gathered row by row.
ROWS = (2, 5, 3, 4, 1)
#: Sizes that the ranks give for their microbatches, each its own: they only order tasks.
SIZES = ([1.0, 5.0, 2.0, 4.0, 3.0], [5.0, 1.0, 4.0, 3.0, 2.0])
WEIGHTS = ([2.0, 0.0, 1.0, 4.0, 3.0], [1.0, 5.0, 0.5, 2.0, 0.0])


class Temperature(nn.Module):
    """A contrastive loss with a parameter: each rank's features against those of all ranks."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))
        self._group = group

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_gather  # as user programs gather with gradients

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            everyone = all_gather(output, group=self._group)  # type: ignore[no-untyped-call]
        return contrast(self.scale, output, target, torch.cat(list(everyone)), dist.get_rank(self._group))


def contrast(scale: Tensor, output: Tensor, target: Tensor, everyone: Tensor, index: int) -> Tensor:
    """The loss of rank ``index``, given the features of ``everyone``."""
    logits = scale * torch.tanh(output + target) @ torch.tanh(everyone).T
    return nn.functional.cross_entropy(logits, torch.arange(len(output)) + index * len(output))


def parts() -> list[nn.Module]:
    """The stages, from one seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(STAGES)]


def batch(index: int, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """The microbatches of one data rank."""
    generator = torch.Generator().manual_seed(10 * seed + index)
    drawn = [torch.randn(2, rows, WIDTH, dtype=torch.float64, generator=generator) for rows in ROWS]
    return [each[0] for each in drawn], [each[1] for each in drawn]


def one_process(
    model: list[nn.Module], scale: Tensor, weights: tuple[list[float], list[float]], seed: int, reduction: str
) -> float:
    """Add the gradients of a step over the batches of both ranks; returns its loss."""
    batches = [batch(index, seed) for index in range(DATA)]
    total = sum(map(sum, weights)) if reduction == "mean" else 1.0
    loss = torch.zeros((), dtype=torch.float64)
    for m in range(len(ROWS)):
        outputs = [nn.Sequential(*model)(inputs[m]) for inputs, _ in batches]
        for index, (output, (_, targets)) in enumerate(zip(outputs, batches, strict=True)):
            own = contrast(scale, output, targets[m], torch.cat(outputs), index)
            loss = loss + weights[index][m] / total * own
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def gap(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference of a gradient."""
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    assert pairs
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs if a.grad is not None and b.grad is not None)


# Cases.


def gathers_in_a_loss_meet_those_of_the_same_microbatch(rank: int) -> None:
    """Weights, sizes of each rank's own, accumulation and clipping; equal to one process with all features at hand."""
    ones = ([1.0] * len(ROWS),) * 2
    configurations: list[tuple[dict[str, Any], Any]] = [
        ({}, None),
        ({"split": True, "hint": "bfw-pyramid"}, WEIGHTS),
        ({"deterministic": True, "reduction": "sum"}, WEIGHTS),
        ({"strict": "1f1b"}, WEIGHTS),
    ]
    # Why in this order? Over gloo the backward of torch's all_gather takes ranks of the group for those of the job.
    mesh = DeviceMesh("cpu", [[2, 3], [0, 1]], mesh_dim_names=("pp", "dp"))
    stage, index = mesh.get_coordinate() or ()
    group = mesh.get_group("dp")
    for options, weights in configurations:
        model, expected, theirs = parts(), parts(), Temperature()
        loss_fn = Temperature(group)
        pipeline = rrfp.Pipeline(
            model[stage], mesh=mesh, coordinate=("tp", "dp"), reduce=("dp",), loss_fn=loss_fn, **options
        )
        with pipeline.blocking() as pipe:
            for seed in range(2):
                inputs, targets = batch(index, seed)
                result = pipe.step(
                    inputs,
                    targets,
                    weights=None if weights is None else weights[index],
                    sizes=None if "strict" in options else SIZES[index],
                    reduce_gradients=seed == 1,
                )
                reduction = options.get("reduction", "mean")
                loss = one_process(expected, theirs.scale, weights or ones, seed, reduction)
                assert abs((result.loss or 0.0) - loss) < 1e-9
            norm = pipe.clip_grad_norm_(0.01)
        whole = nn.ModuleList([*expected, theirs])
        assert abs(norm - float(nn.utils.clip_grad_norm_(whole.parameters(), 0.01))) < 1e-9
        assert gap(model[stage], expected[stage]) < 1e-9
        if stage == STAGES - 1:
            assert gap(loss_fn, theirs) < 1e-9


def ranks_of_a_reduced_dim_draw_other_masks_and_have_losses_of_their_own(rank: int) -> None:
    masks: list[Tensor] = []

    def keep(output: Tensor, target: Tensor) -> Tensor:
        masks.append(output.detach() != 0)
        return output.square().mean()

    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.5)) if rank // DATA else nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    inputs = [torch.ones(3, WIDTH) * (1 + rank % DATA)] * 2
    with rrfp.Pipeline(model, topology=rrfp.Topology.from_env(**JOINED), loss_fn=keep).blocking() as pipe:
        result = pipe.step(inputs, inputs)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (masks, result.losses, result.loss))
    if rank // DATA:
        assert not torch.equal(told[2][0][0], told[3][0][0])
    assert told[0][1] == told[2][1] != told[1][1] == told[3][1]
    assert abs(told[0][2] - sum(told[0][1] + told[1][1]) / 4) < 1e-9
    assert len({loss for _, _, loss in told}) == 1


def another_number_of_microbatches_is_one_error_on_all(rank: int) -> None:
    inputs = [torch.ones(2, WIDTH)] * (3 if rank % DATA else 4)
    topology = rrfp.Topology.from_env(**JOINED)
    pipeline = rrfp.Pipeline(nn.Linear(WIDTH, WIDTH), topology=topology, loss_fn=nn.functional.mse_loss)
    with pytest.raises(PipelineAborted) as caught, pipeline.blocking() as pipe:
        pipe.step(inputs, inputs)
    assert "microbatches" in str(caught.value)


def what_reduces_differs_is_one_error_on_all(rank: int) -> None:
    settings = {**JOINED, "reduce": ("dp",) if rank else ()}
    pipeline = rrfp.Pipeline(nn.Linear(WIDTH, WIDTH), topology=rrfp.Topology.from_env(**settings))
    with pytest.raises(
        ConfigError, match=r"^reduce is '' on stage 0, dp 0 \(rank 0\) and 'dp' on stage 0, dp 1 \(rank 1"
    ):
        pipeline.blocking().__enter__()


def synchronised_batch_norm_needs_one_order(rank: int) -> None:
    mesh = init_device_mesh("cpu", (STAGES, DATA), mesh_dim_names=("pp", "dp"))
    for group, text in (
        (
            None,
            r"the submodule '1' of virtual stage 0 is a SyncBatchNorm over the ranks \[0, 1, 2, 3\], and its "
            r"collectives run inside tasks, but these ranks are of several stages: its process_group must not have the "
            r"dim 'pp'; then coordinate is \('tp',\), must be \('tp', 'dp'\), with reduce=\('dp',\) unless parameters "
            r"are sharded over that",
        ),
        (
            mesh.get_group("dp"),
            r"is a SyncBatchNorm over the ranks \[\d, \d\], and its collectives run inside tasks: coordinate is "
            r"\('tp',\), must be \('tp', 'dp'\), with reduce=\('dp',\)",
        ),
    ):
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SyncBatchNorm(WIDTH, process_group=group))
        own = {"mesh": mesh} if group is None or rank // DATA else {"topology": rrfp.Topology.from_env(dims=DIMS)}
        with pytest.raises(ConfigError, match=text if rank // DATA == 0 else text.replace("stage 0", "stage 1")):
            rrfp.Pipeline(module, **own)
        with pytest.raises(ConfigError, match=r"all stages are in this process.*must be without SyncBatchNorm"):
            rrfp.local([nn.Linear(WIDTH, WIDTH), module])
    rrfp.Pipeline(module, topology=rrfp.Topology.from_env(**JOINED))


def a_parameter_sharded_over_a_reduced_dim_is_refused(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (STAGES, DATA), mesh_dim_names=("pp", "dp"))
    module = nn.Linear(WIDTH, WIDTH)
    fully_shard(module, mesh=mesh["dp"])
    with pytest.raises(
        ConfigError, match=r"is a DTensor over the mesh dim 'dp'.*reduce is \('dp',\), must not have 'dp'"
    ):
        rrfp.Pipeline(module, mesh=mesh, coordinate=("tp", "dp"), reduce=("dp",))


def shards_are_summed_over_replicas_after_an_evaluation_too(rank: int) -> None:
    """It leaves the outermost module's parameters gathered, in objects that never get gradients."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "dp_shard"))
    module = parts()[0]
    fully_shard(module, mesh=mesh["dp_shard"])
    inputs, targets = batch(rank)
    pipeline = rrfp.Pipeline(
        module, mesh=mesh, coordinate=("tp", "dp_shard"), loss_fn=nn.functional.mse_loss, deterministic=True
    )
    gradients: list[list[Tensor]] = []
    with pipeline.blocking() as pipe:
        for _ in range(2):
            pipe.step(inputs, targets)
            shards: list[Any] = [parameter.grad for parameter in module.parameters()]
            gradients.append([shard.to_local().clone() for shard in shards])
            module.zero_grad()
            pipe.evaluate(inputs, targets)
    assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))


def train(pipe: BlockingPipeline, optimizer: torch.optim.Optimizer, inputs: list[Tensor], *, extra: bool) -> None:
    """Steps, the fourth of which to reduce compares; another rank may return from it before the abort ends it."""
    for step in range(6):
        pipe.step(inputs, inputs, reduce_gradients=step > 0)
        optimizer.step()
        if extra and step == 3:
            optimizer.step()


def an_optimizer_step_on_one_rank_is_found(rank: int) -> None:
    """With replicas, and with a coordinated dim over which gradients are summed."""
    for settings in ({"dims": DIMS}, JOINED):
        module = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(0.5)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        inputs = [torch.ones(2, WIDTH)] * 3
        topology = rrfp.Topology.from_env(**settings)
        pipeline = rrfp.Pipeline(module, topology=topology, loss_fn=nn.functional.mse_loss, check_replicas=3)
        text = (
            r"parameter 'weight' of virtual stage 1 has other values on stage 1, dp 1 \(rank 3\) than on stage 1, dp 0 "
            r"\(rank 2\)"
        )
        with pytest.raises(PipelineAborted, match=text), pipeline.blocking() as pipe:
            train(pipe, optimizer, inputs, extra=rank == 3)


def checkpoints_keep_the_buffers_and_extra_of_each_rank_of_a_reduced_dim(rank: int) -> None:
    def entered(model: nn.Module) -> rrfp.Pipeline:
        return rrfp.Pipeline(model, topology=rrfp.Topology.from_env(**JOINED), loss_fn=nn.functional.mse_loss)

    folder: list[str] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    stage, index = divmod(rank, DATA)
    model, again = (nn.BatchNorm1d(WIDTH) for _ in range(2))
    inputs = [torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(index))] * 2
    with entered(model) as pipe:
        pipe.step(inputs, inputs)
        rrfp.checkpoint.save(folder[0], {f"stage{stage}": model}, None, pipe=pipe, extra=index)
    with entered(again) as pipe:
        loaded = rrfp.checkpoint.load(folder[0], {f"stage{stage}": again}, None, pipe=pipe)
    assert loaded is not None
    assert loaded.extra == index
    mean, loaded_mean = model.running_mean, again.running_mean
    assert mean is not None
    assert loaded_mean is not None
    assert torch.equal(loaded_mean, mean)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, loaded_mean.tolist())
    assert told[0] != told[1]
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def checkpoints_resume_sharded_parameters_and_the_statistics_of_each_rank_to_the_bit(rank: int) -> None:
    """Of a model with batch norm, whose ranks shard parameters over a coordinated dim and have data of their own."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (STAGES, DATA), mesh_dim_names=("pp", "dp"))
    stage, index = divmod(rank, DATA)

    def trained(steps: int, *, save: bool = False) -> dict[str, Tensor]:
        norm = nn.BatchNorm1d(WIDTH)
        model = nn.Sequential(parts()[stage], norm).double()
        fully_shard(model, mesh=mesh["dp"])
        norm.register_buffer("counts", distribute_tensor(torch.arange(4.0), mesh["dp"], [Shard(0)]))
        optimizer = torch.optim.Adam(model.parameters())
        pipe = rrfp.Pipeline(
            model, mesh=mesh, coordinate=("tp", "dp"), loss_fn=nn.functional.mse_loss, deterministic=True
        )
        named = {f"stages.{stage}": model}
        loaded = rrfp.checkpoint.load(folder[0], named, optimizer, pipe=pipe)
        with pipe.blocking() as run:
            for step in range(0 if loaded is None else loaded.step, steps):
                run.step([torch.cat([x, -x]) for x in batch(index, step)[0]], [y.repeat(2, 1) for y in batch(index)[1]])
                optimizer.step()
                optimizer.zero_grad()
            if save:
                rrfp.checkpoint.save(folder[0], named, optimizer, pipe=pipe, extra=index)
        if loaded is not None:
            assert loaded.extra == index
        state = model.state_dict()
        return {name: each.to_local() if isinstance(each, DTensor) else each for name, each in state.items()}

    folder: list[str] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    whole = trained(4)
    trained(2, save=True)
    resumed = trained(4)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, whole["1.running_mean"].tolist())
    assert told[0] != told[1]
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def a_plain_tensor_with_other_values_on_a_rank_of_a_group_is_not_saved(rank: int) -> None:
    """A shard that is no DTensor would be saved once, for all ranks of the group."""
    topology = rrfp.Topology.from_env(dims={"pp": STAGES, "tp": DATA})
    module = nn.Linear(WIDTH, WIDTH)
    nn.init.constant_(module.weight, float(rank % DATA))
    pipe = rrfp.Pipeline(module, topology=topology, loss_fn=nn.functional.mse_loss)
    text = r"modules: 'stage0.weight' is another value on rank 1 than on rank 0, of the same stage and group: must be a"
    with pytest.raises(ConfigError, match=text):
        rrfp.checkpoint.save("unused", {f"stage{rank // DATA}": module}, pipe=pipe)
