"""Cases for 4 ranks: two stages by two replicas over zmq and gloo, compared with the one-process reference.

The replicas have 3 and 5 microbatches, of different lengths. A configuration's gap is the largest difference of a
gradient, a loss or a norm; infinite where something else is wrong.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from runtime.toys import TOLERANCE, Data, data, loss_fn, placed, stages
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import rrfp
from rrfp import StepResult
from rrfp.compute.rng import replica_seed
from rrfp.compute.split import backward as split_backward
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.testing.reference import reference

STAGES = REPLICAS = 2

V: dict[str, Any] = {"chunks": 2, "placement": "v"}
#: What is done with each pipeline, and its options.
CONFIGURATIONS: list[tuple[str, dict[str, Any]]] = [
    ("accumulates", {"hint": "bf"}),
    ("accumulates", {"hint": "bfw", "split": True, "tokens": True, "layout": "mesh"}),
    ("accumulates", {"strict": "1f1b", "reduction": "sum", "tokens": True}),
    ("accumulates", {"chunks": 2, "hint": "bf", "tokens": True}),
    ("accumulates", {**V, "hint": "bfw", "split": True, "layout": "dp first"}),
    ("accumulates", {**V, "strict": "zb-v", "split": True, "tokens": True}),
    ("accumulates", {"deterministic": True, "hint": "bf", "tokens": True}),
    ("repeats bitwise", {**V, "split": True, "deterministic": True, "hint": "bfw", "tokens": True}),
    ("trains", {"chunks": 2, "split": True, "tokens": True, "learned": True}),
    ("scales", {"hint": "bf", "tokens": True}),
    ("evaluates", {"hint": "bf", "tokens": True, "padded": True}),
]


class Uneven(nn.Module):
    """A part for microbatches of one row only: some replicas never use it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.expert = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(self.expert(x) if len(x) == 1 else x)
        return output


class Learned(nn.Module):
    """A loss with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 1.5, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return loss_fn(output * self.scale, target)


class Job:
    """One pipeline of four ranks, and the same model in one process.

    Args:
        options: of the pipeline, ``tokens`` (whether losses have weights), ``padded`` (some of them are 0, and the data
            no numbers), ``learned`` (the loss has parameters) and ``layout`` (how ranks are laid out).
    """

    def __init__(self, options: dict[str, Any]) -> None:
        options = dict(options)
        self.tokens = options.pop("tokens", False)
        self.padded, learned = options.pop("padded", False), options.pop("learned", False)
        layout = options.pop("layout", "pp first")
        self.reduction = options.get("reduction", "mean")
        count = STAGES * options.get("chunks", 1)
        where: dict[str, Any] = {}
        if layout == "mesh":
            where["mesh"] = mesh = init_device_mesh("cpu", (STAGES, REPLICAS), mesh_dim_names=("pp", "dp"))
            self.place = rrfp.Topology.from_mesh(mesh)
        else:
            dims = {"dp": REPLICAS, "pp": STAGES} if layout == "dp first" else {"pp": STAGES, "dp": REPLICAS}
            where["topology"] = self.place = rrfp.Topology.from_env(dims=dims)
        self.is_v = options.get("placement") == "v"
        self._model = self.expected = build(count)
        pieces = placed(build(count), STAGES, "v" if self.is_v else "looped")
        self.own = pieces[self.place.stage]
        self.theirs = placed(self.expected, STAGES, "v" if self.is_v else "looped")[self.place.stage]
        self._loss = Learned() if learned else loss_fn
        loss = Learned() if learned else loss_fn
        self.pipeline = rrfp.Pipeline(self.own, loss_fn=loss, **where, **options)
        if isinstance(self._loss, nn.Module) and isinstance(loss, nn.Module):
            self.expected = [*self._model, self._loss]
            if self._is_last:
                self.own, self.theirs = [*self.own, loss], [*self.theirs, self._loss]
        self.gap = 0.0
        self._number = 0

    def step(self, pipe: BlockingPipeline, seed: int = 0, **arguments: Any) -> StepResult:
        """A step on both sides; compares what it reports."""
        batches = self._batches(seed)
        result = self._run(pipe.step, batches, **arguments)
        total = self._total(batches)
        losses = [
            self._reference(batch, grad_scale=1 / total, seed=replica_seed(0, replica), step=self._number)
            for replica, batch in enumerate(batches)
        ]
        self._compare(result.loss, sum(loss for loss in losses if loss is not None) / total)
        self._number += 1
        return result

    def _reference(self, batch: Data, **options: Any) -> float | None:
        weights = batch.lengths if self.tokens else None
        options |= {"loss_fn": self._loss, "weights": weights, "reduction": "sum"}
        return reference(self._model, batch.inputs, batch.targets, **options).loss

    def evaluate(self, pipe: BlockingPipeline, seed: int = 0) -> None:
        """Forward only, without dropout."""
        batches = self._batches(seed)
        for module in (*self.own, *self.expected):
            module.eval()
        with torch.no_grad():
            result = self._run(pipe.evaluate, batches)
            losses = [self._reference(batch) for batch in batches]
        self._compare(result.loss, sum(loss for loss in losses if loss is not None) / self._total(batches))

    def check(self) -> None:
        """Compare the gradients of this rank's parameters."""
        self.gap = max(self.gap, difference(self.own, self.theirs))

    def _run(self, call: Callable[..., StepResult], batches: Sequence[Data], **arguments: Any) -> StepResult:
        mine = batches[self.place.replica]
        return call(
            mine.inputs if self.place.stage == 0 else None,
            mine.targets if self._is_last else None,
            weights=mine.lengths if self._is_last and self.tokens else None,
            microbatches=len(mine.inputs),
            **arguments,
        )

    @property
    def _is_last(self) -> bool:
        return self.place.stage == (0 if self.is_v else STAGES - 1)

    def _batches(self, seed: int) -> list[Data]:
        batches = [data(3, seed=2 * seed), data(5, seed=2 * seed + 1)]
        for batch, empty in zip(batches, ([0, 1, 2], [3]), strict=True):
            for m in empty if self.padded else ():
                batch.lengths[m] = 0.0
                batch.inputs[m].fill_(math.nan)
        return batches

    def _total(self, batches: Sequence[Data]) -> float:
        """What the weighted losses are divided by."""
        if self.reduction == "sum":
            return 1.0
        return sum(sum(batch.lengths) if self.tokens else len(batch.inputs) for batch in batches)

    def _compare(self, ours: float | None, theirs: float) -> None:
        """The loss is the reference's, and the same on all ranks to the last bit."""
        assert ours is not None
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, ours)
        self.gap = max(self.gap, abs(ours - theirs), math.inf if len(set(told)) > 1 else 0.0)


def build(count: int) -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return [Uneven(module) if v == 1 else module for v, module in enumerate(stages(count))]


def difference(ours: Sequence[nn.Module], theirs: Sequence[nn.Module]) -> float:
    """The largest one between gradients, infinite where only one side has one."""
    pairs = [
        pair
        for left, right in zip(ours, theirs, strict=True)
        for pair in zip(left.parameters(), right.parameters(), strict=True)
    ]
    assert pairs
    worst = 0.0
    for left, right in pairs:
        if left.grad is None or right.grad is None:
            worst = max(worst, 0.0 if left.grad is right.grad else math.inf)
        else:
            worst = max(worst, (left.grad - right.grad).abs().max().item())
    return worst


def accumulates(job: Job) -> None:
    """Over steps that all reduce, then anew over steps of which only the last does."""
    with job.pipeline.blocking() as pipe:
        for number in range(2):
            job.step(pipe, number)
            job.check()
        for module in (*job.own, *job.expected):
            module.zero_grad()
        job.step(pipe, 2, reduce_gradients=False)
        job.step(pipe, 3)
        job.check()


def trains(job: Job) -> None:
    """An optimizer and clipping on both sides: parameters stay the same too."""
    ours = torch.optim.AdamW([p for module in job.own for p in module.parameters()], lr=0.1)
    theirs = torch.optim.AdamW([p for module in job.expected for p in module.parameters()], lr=0.1)
    everything = [p for module in job.expected for p in module.parameters()]
    with job.pipeline.blocking() as pipe:
        for number, norm_type in enumerate((2.0, 2.0, math.inf, 1.0)):
            job.step(pipe, number)
            norm = pipe.clip_grad_norm_(0.01, norm_type)
            wanted = float(nn.utils.clip_grad_norm_(everything, 0.01, norm_type))
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, norm)
            job.gap = max(job.gap, abs(norm - wanted), math.inf if len(set(told)) > 1 else 0.0)
            job.check()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()


def scales(job: Job) -> None:
    """The total is scaled in place between two steps, and zeroed in place between two others."""
    with job.pipeline.blocking() as pipe:
        for number in range(3):
            job.step(pipe, number)
            job.check()
            for module in (*job.own, *job.expected):
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5 if number == 0 else 0.0)


def evaluates(job: Job) -> None:
    """Between steps, which must not matter to what was accumulated."""
    with job.pipeline.blocking() as pipe:
        job.step(pipe, 0)
        job.evaluate(pipe, 5)
        for module in (*job.own, *job.expected):
            module.train()
        job.step(pipe, 1)
        job.check()


def repeats_bitwise(options: dict[str, Any]) -> float:
    """Two runs, one of them with pauses that depend on the rank."""
    runs = []
    for pause_s in (0.0, 0.003 * (1 + dist.get_rank())):
        job = Job(options)
        for module in job.own:
            module.register_forward_pre_hook(lambda *_, pause_s=pause_s: time.sleep(pause_s))
        accumulates(job)
        runs.append((job, [p.grad for module in job.own for p in module.parameters()]))
    pairs = zip(runs[0][1], runs[1][1], strict=True)
    same = all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
    return max(job.gap for job, _ in runs) if same else math.inf


def gap(what: str, options: dict[str, Any]) -> float:
    """Run one configuration."""
    if what == "repeats bitwise":
        return repeats_bitwise(options)
    job = Job(options)
    {"accumulates": accumulates, "trains": trains, "scales": scales, "evaluates": evaluates}[what](job)
    return job.gap


def gradients_of_two_replicas_are_the_references(rank: int) -> None:
    """Every configuration, one pipeline after the other."""
    split_backward.MIN_FLOPS = 0.0  # or nothing of this size would be deferred
    gaps = {f"{what} {options}": gap(what, options) for what, options in CONFIGURATIONS}
    assert len(gaps) == len(CONFIGURATIONS)
    assert {name: gap for name, gap in gaps.items() if not gap < TOLERANCE} == {}
