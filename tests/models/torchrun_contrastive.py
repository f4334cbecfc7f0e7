"""Run under torchrun: CLIP in two stages on two ranks of data each, whose loss compares the features of both ranks.

Usage: ``torchrun --nproc-per-node 4 ... torchrun_contrastive.py CONFIGURATION,...``. Prints one JSON line a rank: the
largest error of what it has, for each configuration, against one process with the features of both at hand.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from models.case import Microbatch
from models.catalogue import CONFIGURATIONS, Configuration, build, load, stages_of
from models.clip import Images, Texts, draw
from models.training import MAX_NORM, STEPS, Step, buffers_of, errors, gradients_of, names_in, optimizer_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import rrfp
from rrfp.compute.split import backward as split_backward

DATA, MICROBATCHES = 2, 5
MIN_FLOPS = split_backward.MIN_FLOPS


class Features(Texts):
    """The features of texts and images, and the scale of their similarities."""

    def forward(self, images: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        texts = self.projection(self.tower(ids, attention_mask=mask).pooler_output)
        unit = nn.functional.normalize
        return unit(texts, dim=-1), unit(images, dim=-1), self.scale.exp()


def contrast(own: tuple[Tensor, Tensor, Tensor], all_texts: Tensor, all_images: Tensor, index: int) -> Tensor:
    """The loss of data rank ``index``: how well its texts find their images among all, and its images their texts."""
    texts, images, scale = own
    pairs = torch.arange(len(texts)) + index * len(texts)
    cross_entropy = nn.functional.cross_entropy
    found = cross_entropy(scale * texts @ all_images.T, pairs), cross_entropy(scale * images @ all_texts.T, pairs)
    return (found[0] + found[1]) / 2


class Gathered:
    """The same, of which each data rank has its own features."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group, self._index = mesh.get_group("dp"), mesh.get_local_rank("dp")

    def __call__(self, own: tuple[Tensor, Tensor, Tensor], target: None) -> Tensor:
        from torch.distributed.nn.functional import all_gather  # as OpenCLIP gathers, with gradients

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            texts, images = (torch.cat(list(all_gather(each, group=self._group))) for each in own[:2])  # type: ignore[no-untyped-call]
        return contrast(own, texts, images, self._index)


def batch_of(step: int, index: int) -> list[Microbatch]:
    """Those of a data rank; as many rows as the other has in its own."""
    generator = torch.Generator().manual_seed(100 * step + index)
    return [draw(generator, m) for m in range(MICROBATCHES)]


def weights_of(step: int, index: int) -> list[float]:
    """Other ones on each rank, by which each also orders its microbatches."""
    return [1.0 + (3 * m + step + 2 * index) % 5 for m in range(MICROBATCHES)]


def train_plainly() -> list[list[Step]]:
    """One process trains on the batches of both data ranks; the steps as each of these sees them."""
    model: Any = build(load("clip"))
    towers, optimizer = (Images(model), Features(model)), optimizer_of(model)
    steps: list[list[Step]] = [[] for _ in range(DATA)]
    for number in range(STEPS):
        batches = [batch_of(number, index) for index in range(DATA)]
        weights = [weights_of(number, index) for index in range(DATA)]
        total = sum(map(sum, weights))
        losses: list[list[float]] = [[] for _ in range(DATA)]
        for m in range(MICROBATCHES):
            outputs = [towers[1](*towers[0](*batch[m].inputs)) for batch in batches]
            texts, images = (torch.cat([output[part] for output in outputs]) for part in (0, 1))
            loss = torch.zeros((), dtype=torch.float64)
            for index, output in enumerate(outputs):
                own = contrast(output, texts, images, index)
                losses[index].append(own.item())
                loss = loss + weights[index][m] / total * own
            loss.backward()  # type: ignore[no-untyped-call]
        mean = sum(w * x for ws, xs in zip(weights, losses, strict=True) for w, x in zip(ws, xs, strict=True)) / total
        gradients = gradients_of(model, model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
        for index in range(DATA):
            steps[index].append(Step(mean, tuple(losses[index]), gradients, norm, {}))
        optimizer.step()
        optimizer.zero_grad()
    return steps


def error(configuration: Configuration, expected: list[list[Step]]) -> float:
    """The largest one of this rank."""
    split_backward.MIN_FLOPS = 0.0 if configuration.defer_all else MIN_FLOPS
    # Why in this order? Over gloo the backward of torch's all_gather takes ranks of the group for those of the job.
    mesh = DeviceMesh("cpu", [[2, 3], [0, 1]], mesh_dim_names=("pp", "dp"))
    stage, index = mesh.get_coordinate() or ()
    case = load("clip")
    model: Any = build(case)
    stages_of(case, model)
    here = (Images, Features)[stage](model)
    optimizer = optimizer_of(here)
    options: Any = {**configuration.options(case), "loss_fn": Gathered(mesh)}
    pipeline = rrfp.Pipeline(here, mesh=mesh, coordinate=("tp", "dp"), reduce=("dp",), **options)
    steps = []
    with pipeline.blocking() as pipe:
        for number in range(STEPS):
            weights = weights_of(number, index)
            sizes = weights if configuration.hint is None else None
            inputs = [each.inputs for each in batch_of(number, index)]
            result = pipe.step(inputs, [None] * MICROBATCHES, weights=weights, sizes=sizes)
            assert result.loss is not None
            gradients = gradients_of(model, here)
            norm = pipe.clip_grad_norm_(MAX_NORM)
            steps.append(Step(result.loss, tuple(result.losses), gradients, norm, buffers_of(model, here)))
            optimizer.step()
            optimizer.zero_grad()
    return max(errors(steps, expected[index], names_in(model, here)))


def main(configurations: str) -> None:
    """Run everything on this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    expected = train_plainly()
    worst = {chosen: error(CONFIGURATIONS[chosen], expected) for chosen in configurations.split(",")}
    rank = dist.get_rank()
    dist.destroy_process_group()
    sys.stdout.write(json.dumps({"rank": rank, "worst": worst}) + "\n")  # in one piece, since the ranks share the pipe
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
