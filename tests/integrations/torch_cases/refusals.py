"""What is refused before any task runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from integrations.torch_parts import CPU, Rank, batch, loss_fn
from torch import nn
from torch.distributed.pipelining import PipelineStage

import rrfp
from rrfp.errors import ConfigError
from rrfp.integrations.torch import ScheduleRRFP


def a_stage_on_no_rank_or_on_two_is_refused() -> None:
    """On every rank, and by the name of what each rank holds."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    virtual = 2 * ranks + 1
    mine = [2 * me, 2 * me + 1]
    stages = [PipelineStage(nn.Linear(2, 2), v, virtual, CPU) for v in mine]
    with pytest.raises(
        ConfigError, match=rf"stages are \[0, 1\] on rank 0.*: stage {virtual - 1} is on no rank, must be"
    ):
        ScheduleRRFP(stages, 2, loss_fn)
    stages = [PipelineStage(nn.Linear(2, 2), v, virtual, CPU) for v in (*mine, virtual - 1)]
    with pytest.raises(ConfigError, match=rf"stage {virtual - 1} is on the ranks 0, 1.*, must be on one"):
        ScheduleRRFP(stages, 2, loss_fn)


def strict_schedules_refuse_unequal_stages() -> None:
    """They are generated for equally many stages a rank."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    virtual = 2 * ranks + 1
    mine = [0, 1, virtual - 1] if me == 0 else [2 * me, 2 * me + 1]
    stages = [PipelineStage(nn.Linear(2, 2), v, virtual, CPU) for v in mine]
    with pytest.raises(ConfigError, match="takes a chain with equally many chunks on each stage"):
        ScheduleRRFP(stages, 2, loss_fn, strict="1f1b")


def ranks_that_differ_are_refused() -> None:
    stage = PipelineStage(nn.Linear(2, 2), dist.get_rank(), dist.get_world_size(), CPU)
    with pytest.raises(ConfigError, match=r"n_microbatches is 2 on rank 0, 3 on rank 1.*must be the same on all ranks"):
        ScheduleRRFP(stage, 2 + dist.get_rank(), loss_fn)
    with pytest.raises(ConfigError, match=r"loss_fn is a function on rank 0, None on rank 1.*must be the same on all"):
        ScheduleRRFP(stage, 2, None if dist.get_rank() else loss_fn)
    with pytest.raises(ConfigError, match=r"scale_grads is True on rank 0, False on rank 1.*must be the same on all"):
        ScheduleRRFP(stage, 2, loss_fn, scale_grads=dist.get_rank() == 0)
    with pytest.raises(ConfigError, match="hint"):
        ScheduleRRFP(stage, 2, loss_fn, hint=("bf", "fb")[dist.get_rank() % 2])


def arguments_that_do_not_fit_are_refused_together() -> None:
    def stage(v: int = dist.get_rank(), count: int = dist.get_world_size()) -> PipelineStage:
        return PipelineStage(nn.Linear(2, 2), v, count, CPU)

    for arguments, options, expected in (
        ((stage(), 0, loss_fn), {"init_timeout": 0}, "n_microbatches is 0, must be .*\n- init_timeout is 0, must be"),
        (([], 2, loss_fn), {}, "stages is empty"),
        ((nn.Linear(2, 2), 2, loss_fn), {}, r"stages\[0\] is a Linear, must be a PipelineStage"),
        (([stage(), stage()], 2, loss_fn), {}, "must have each once"),
        (([stage(), stage(0, 9)], 2, loss_fn), {}, r"stages\[1\].num_stages is 9, must be stages\[0\]'s"),
        ((stage(), 2, "mse"), {}, r"^loss_fn is 'mse', must be callable: loss_fn\(output, target\), or None$"),
        ((stage(), 2, loss_fn), {"placement": "v", "seed": 3}, r"does not take placement \(.*\), seed \("),
        ((stage(), 2, loss_fn), {"share_replicas": True}, r"does not take share_replicas \(torch's stages run"),
        ((stage(), 2, loss_fn), {"limit": rrfp.Limit(bytes=100)}, "limit: bytes is 100, must be None"),
        ((stage(), 2, loss_fn), {"limit": "8kB"}, "limit: bytes is 8000, must be None"),
        ((stage(), 2, loss_fn), {"coordinate": ("tp",)}, "coordinate goes with mesh"),
        ((stage(), 2, loss_fn), {"hnit": "bf"}, r"unknown option 'hnit' \(did you mean 'hint'\?\): docs"),
        ((stage(), 2, loss_fn), {"split": 1}, "split is 1, must be True or False"),
        ((stage(), 2, loss_fn), {"strict": "zb-h1"}, "split is False, must be True for the schedule 'zb-h1'"),
    ):
        with pytest.raises(ConfigError, match=expected):
            ScheduleRRFP(*arguments, **options)


def targets_and_losses_without_a_loss_fn_are_refused() -> None:
    """On whatever rank they are given: nothing would be trained. The schedule goes on."""
    rank = Rank(1, 4, loss=None)
    x, y = batch(0, 8)
    args = (x,) if rank.is_first else ()
    cut: dict[str, Any] = {"target_mbs": list(y.chunk(4)), "arg_mbs": [(part,) for part in x.chunk(4)]}
    given: tuple[tuple[tuple[Any, ...], dict[str, Any], str], ...] = (
        (args, {"target": y, "losses": []}, "target and losses is passed"),
        (args, {"losses": []}, "losses is passed"),
        ((), cut, "target_mbs is passed"),
    )
    for call in (rank.schedule.step, rank.schedule.eval):
        for arguments, options, expected in given:
            with pytest.raises(ConfigError, match=f"loss_fn is None, must be a function .*{expected}"):
                call(*arguments, **options)
    wrong: Any = 3
    with pytest.raises(ConfigError, match=r"^loss_kwargs is 3, must be a dict of keywords of loss_fn, or None$"):
        rank.schedule.step(*args, loss_kwargs=wrong)
    rank.schedule.step(*args)
    rank.schedule.close()


def stages_that_another_schedule_has_prepared_are_refused() -> None:
    """For another number of microbatches; with the same one, two schedules may take turns."""
    rank = Rank(1, 4)
    rank.steps(1)
    same, first = ScheduleRRFP(rank.stages, 4, loss_fn, hint="bf"), rank.schedule
    for schedule in (same, first):
        rank.schedule = schedule
        rank.steps(1)
    other = ScheduleRRFP(rank.stages, 2, loss_fn)
    x, y = batch(0, 8)
    args, kwargs = rank.arguments(x, y, [])
    other.step(*args, **kwargs)
    with pytest.raises(ConfigError, match="n_microbatches is 4, must be 2: another schedule has prepared stage"):
        rank.schedule.step(*args, **kwargs)
    rank.zero_grad()
    rank.schedule.close()
    rank.schedule = ScheduleRRFP(rank.stages, 4, loss_fn)
    rank.steps(1)
    for schedule in (rank.schedule, same, other):
        schedule.close()


def batches_that_do_not_fit_are_refused_before_any_task() -> None:
    """And the schedule goes on."""
    rank = Rank(1, 4)
    x, y = batch(0, 8)
    cut = [(part,) for part in x.chunk(4)]
    for arguments, options, error, expected in (
        ((x,), {"arg_mbs": cut}, ValueError, "positional arguments with arg_mbs"),
        ((), {"arg_mbs": cut, "target": y, "scale": 3}, ValueError, "target, scale with arg_mbs"),
        ((), {"arg_mbs": cut[:3]}, ValueError, "4 arg_mbs but got 3"),
        ((), {"arg_mbs": tuple(cut)}, TypeError, "arg_mbs is a tuple, must be a list"),
        ((), {"arg_mbs": list(x.chunk(4))}, TypeError, r"arg_mbs\[0\] is a Tensor, must be a tuple"),
        ((), {"kwarg_mbs": [()] * 4}, TypeError, r"kwarg_mbs\[0\] is a tuple, must be a dict"),
    ):
        with pytest.raises(error, match=expected):
            rank.schedule.step(*arguments, **options)
    if rank.is_last:
        with pytest.raises(ConfigError, match="target is None"):
            rank.schedule.step(*((x,) if rank.is_first else ()))
    with torch.no_grad(), pytest.raises(RuntimeError, match="call eval"):
        rank.schedule.step(*((x,) if rank.is_first else ()))
    rank.steps(1)
    rank.schedule.close()
