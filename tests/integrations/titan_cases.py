"""torchtitan's own trainer with RRFP as its schedule; every function is a case that runs on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from integrations.titan_parts import (
    MICROBATCHES,
    STEPS,
    CutInterleaved,
    Seen,
    Watched,
    config,
    one_process,
    titan,
    weights,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from rrfp.errors import ConfigError
from rrfp.hints import Hint, Kind, ReadySet, Task, View
from rrfp.integrations.torch import ScheduleRRFP
from rrfp.integrations.torchtitan import IN_TASKS, schedule_class

#: For more than pipelines: FSDP of torch 2.13 does not know the types of torchtitan's default.
LEGACY = "partial_dtensor"


def trained(
    schedule: str, classes: Callable[[str], Any] = schedule_class, **other: Any
) -> tuple[Watched, dict[str, torch.Tensor]]:
    """The trainer after its last step, and the weights of the whole model before its first."""
    with patch.object(titan, "get_schedule_class", classes):
        trainer = Watched(config(schedule, **other))
        start = weights(trainer)
        trainer.train()
        trainer.close()
    return trainer, start


def close(own: Any, other: Any, *, exact: bool) -> None:
    torch.testing.assert_close(own, other, rtol=0.0 if exact else 1e-4, atol=0.0 if exact else 1e-6)


def compare(own: Seen, other: Seen, *, exact: bool) -> None:
    """Everything but the losses, which only the rank of the last stage has."""
    assert len(own.gradients) == len(other.gradients) == len(own.norms) == STEPS
    for gradients, others in zip(own.gradients, other.gradients, strict=True):
        for name, gradient in gradients.items():
            close(gradient, others[name], exact=exact)
    close(own.norms, other.norms, exact=exact)


def compare_losses(own: Seen, other: Seen, *, exact: bool) -> None:
    """On the rank of the last stage; the first step's are exact in any case."""
    assert len(own.losses) == STEPS
    assert len(own.validated) == 2
    close(own.losses[0], other.losses[0], exact=True)
    close(own.losses, other.losses, exact=exact)
    close(own.validated, other.validated, exact=exact)


def to_the_bit(**other: Any) -> tuple[Watched, dict[str, torch.Tensor]]:
    """Compare with Interleaved1F1B, which adds microbatches in the order of ``deterministic=True``."""
    own, start = trained("rrfp", partial(schedule_class, deterministic=True), **other)
    torchs, torchs_start = trained("Interleaved1F1B", lambda name: CutInterleaved, **other)
    close(start, torchs_start, exact=True)
    compare(own.seen, torchs.seen, exact=True)
    if own.pp_has_last_stage:
        compare_losses(own.seen, torchs.seen, exact=True)
    return own, start


def three_steps() -> None:
    """Losses, norms, clipped gradients and validations; two stages a rank, which torchtitan chooses."""
    trainer, start = to_the_bit()
    assert isinstance(trainer.pp_schedule, ScheduleRRFP)
    reference = one_process(trainer.config, start)
    compare(trainer.seen, reference, exact=False)
    if trainer.pp_has_last_stage:
        compare_losses(trainer.seen, reference, exact=False)
    assert min(trainer.seen.norms) > trainer.config.training.max_norm, "no step clips"


class LatestFirst(Hint):
    """All forwards, then the backwards from the last microbatch to the first."""

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return max(ready, key=lambda task: (task.kind is Kind.F, task.microbatch))


def gradients_in_any_order() -> None:
    """Sums in another order have other last bits."""
    trainer, start = trained("RRFP", partial(schedule_class, hint=LatestFirst, limit=2 * MICROBATCHES))
    reference = one_process(trainer.config, start)
    compare(trainer.seen, reference, exact=False)
    own, others = trainer.seen.gradients[0], reference.gradients[0]
    assert not all(torch.equal(gradient, others[name]) for name, gradient in own.items())


def one_stage_a_rank() -> None:
    """torchtitan gives every schedule of its looped kind two or more, unless the parts are listed."""
    parts = [
        ["tok_embeddings", "layers.0", "layers.1", "layers.2"],
        ["layers.3", "layers.4", "layers.5", "norm", "lm_head"],
    ]
    trainer, start = trained("RRFP", module_fqns_per_model_part=parts)
    assert len(trainer.model_parts) == 1
    compare(trainer.seen, one_process(trainer.config, start), exact=False)


def split_backward() -> None:
    """With selective checkpointing, too: B recomputes a part once, and holds the gradients of its weights."""
    for recomputes in (SelectiveAC, FullAC):
        trainer, start = trained("RRFP", partial(schedule_class, split=True), recomputes=recomputes)
        compare(trainer.seen, one_process(trainer.config, start), exact=False)


def collectives_in_tasks_are_refused() -> None:
    """By the mesh of the stages, as torchtitan's parameters need not show them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for dim, degree in IN_TASKS.items():
        mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("pp", dim))

        def get_mesh(dims: tuple[str, ...], layout: Any = None, mesh: DeviceMesh = mesh) -> DeviceMesh:
            if not set(dims) <= set(mesh.mesh_dim_names or ()):
                raise ValueError(f"Mesh {dims} is not available")  # as torchtitan
            return mesh[dims]

        find: Any = get_mesh
        stage = PipelineStage(nn.Linear(2, 2), rank, ranks, torch.device("cpu"), get_mesh=find)
        with pytest.raises(ConfigError, match=f"^{degree} must be 1 with the schedule RRFP"):
            schedule_class("RRFP")([stage], n_microbatches=2, loss_fn=nn.functional.mse_loss, scale_grads=False)


def sharded_by_fsdp() -> None:
    """On four ranks: two replicas, each a pipeline of two, with halves of all parameters."""
    trainer, _ = to_the_bit(spmd_backend=LEGACY)
    assert trainer.parallel_dims.dp_shard == 2
