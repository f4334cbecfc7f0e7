"""Training by RRFP beside Megatron's own schedules, to the bit; `CASES` by name, each on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from integrations.megatron_parts import Setup, Shuffle, Trainer
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

from rrfp.integrations.megatron import forward_backward_func
from rrfp.model.tasks import B, F, Kind, Task

STEPS = 5

#: Another order than Megatron's, with more memory than Megatron's.
FREE: dict[str, Any] = {"hint": Shuffle, "limit": "2n"}
MOE = {"num_moe_experts": 4}
FUSED = {"gradient_accumulation_fusion": True}
SEQUENCE = {"sequence_parallel": True}

#: As in the trial of an adapter from outside, and with orders of tasks that no schedule of Megatron's has.
CASES = {
    "pp2": Setup(ddp="none"),
    "pp2 free": Setup(options=FREE),
    "pp2 vp2": Setup(vp=2),
    "pp2 vp2 free": Setup(vp=2, options=FREE),
    "pp4 tied": Setup(pp=4, ties=True, options=FREE),
    "pp4 vp2": Setup(pp=4, vp=2, microbatches=8),
    "pp4 vp2 free": Setup(pp=4, vp=2, microbatches=8, options=FREE),
    "tp2 sequence": Setup(tp=2, config=SEQUENCE),
    "tp2 vp2 sequence free": Setup(tp=2, vp=2, config=SEQUENCE, options=FREE),
    "cp2": Setup(cp=2),
    "cp2 vp2 free": Setup(cp=2, vp=2, ddp="overlap", options=FREE),
    "tp2 cp2 free": Setup(tp=2, cp=2, config=SEQUENCE, options=FREE),
    "overlap": Setup(ddp="overlap"),
    "overlap vp2 free": Setup(ddp="overlap", vp=2, options=FREE),
    "align": Setup(ddp="align"),
    "align vp2 free": Setup(ddp="align", vp=2, options=FREE),
    "dp2": Setup(dp=2),
    "dp2 overlap": Setup(dp=2, ddp="overlap", options=FREE),
    "sharded optimizer": Setup(dp=2, ddp="overlap", shards_optimizer=True),
    "sharded optimizer, gathering": Setup(dp=2, ddp="overlap", shards_optimizer=True, gathers_parameters=True),
    "sharded optimizer, bf16": Setup(dp=2, ddp="overlap", shards_optimizer=True, dtype="bf16"),
    "sharded optimizer, vp2 aligned": Setup(
        dp=2, vp=2, ddp="align", shards_optimizer=True, gathers_parameters=True, options=FREE
    ),
    "sharded optimizer, vp2 free": Setup(dp=2, vp=2, ddp="overlap", shards_optimizer=True, options=FREE),
    "per token": Setup(config={"calculate_per_token_loss": True}),
    "per token dp2": Setup(
        dp=2, shards_optimizer=True, dtype="bf16", config={"calculate_per_token_loss": True}, options=FREE
    ),
    "experts": Setup(config=MOE, options=FREE),
    "experts tp2": Setup(tp=2, config=MOE | SEQUENCE),
    "experts ep2": Setup(dp=2, ep=2, config=MOE),
    "experts ep2 free": Setup(dp=2, ep=2, config=MOE, options=FREE),
    "experts cp2 ep2 free": Setup(cp=2, ep=2, config=MOE, options=FREE),
    "experts ep2 sharded": Setup(dp=2, ep=2, ddp="overlap", shards_optimizer=True, dtype="bf16", config=MOE),
    "several tokens": Setup(config={"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3}),
    "bf16": Setup(dtype="bf16", options=FREE),
    "fp16": Setup(dtype="fp16"),
    "recompute full": Setup(
        config={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    ),
    "recompute selective": Setup(config={"recompute_granularity": "selective"}),
    "recompute partly": Setup(
        pp=4,
        config={
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 1,
            "num_microbatches_with_partial_activation_checkpoints": 1,
        },
    ),
    "ragged": Setup(ragged=True, options=FREE),
    "ragged vp2 delayed": Setup(ragged=True, vp=2, jitter=True),
    "delayed": Setup(jitter=True, options={"limit": "2n"}),
    "uneven": Setup(config={"num_layers": 4, "num_layers_in_first_pipeline_stage": 1}),
    "embedding counted": Setup(
        config={"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
        | {"num_layers": 2}
    ),
    "layout": Setup(vp=2, config={"num_layers": 2, "pipeline_model_parallel_layout": "Et|t|L|"}),
    "deallocated": Setup(config={"deallocate_pipeline_outputs": True}, options=FREE),
    "fused": Setup(config=FUSED, options=FREE),
    "fused, deferred": Setup(config=FUSED | {"defer_embedding_wgrad_compute": True}, options=FREE),
    "timers": Setup(timers=True),
    "dropout": Setup(config={"hidden_dropout": 0.1, "attention_dropout": 0.1}, options=FREE),
    "dropout tp2": Setup(tp=2, config={"hidden_dropout": 0.1, "attention_dropout": 0.1}, options=FREE),
    "overwriting": Setup(overwrites=True, options=FREE),
    "overwriting vp2": Setup(overwrites=True, vp=2, options=FREE),
}


@contextmanager
def laid_out(setup: Setup) -> Iterator[None]:
    """Megatron's process groups of a setup."""
    parallel_state.initialize_model_parallel(
        setup.tp,
        setup.pp,
        virtual_pipeline_model_parallel_size=setup.vp,
        context_parallel_size=setup.cp,
        expert_model_parallel_size=setup.ep,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def same(own: dict[str, torch.Tensor], other: dict[str, torch.Tensor], when: str) -> None:
    """To the bit, and the same names."""
    assert own.keys() == other.keys(), when
    differing = [name for name, value in own.items() if not torch.equal(value, other[name])]
    assert not differing, f"{when}: {differing}"


def beside_megatron(name: str) -> None:
    """Losses, gradients and parameters of steps with an optimizer between; then forwards alone."""
    setup = CASES[name]
    with laid_out(setup):
        run, stock = forward_backward_func(**setup.options), schedules.get_forward_backward_func()
        own, other = Trainer(setup), Trainer(setup)
        differing = torch.zeros(1)
        try:
            for step in range(STEPS):
                seen = own.step(run, step)
                tasks = tasks_of(run)
                check_natural(setup, tasks)
                differing += [task.kind for task in tasks] != one_f_one_b(setup)
                same(seen, other.step(stock, step), f"step {step}")
            for more in ({}, {"collect_non_loss_data": True}):
                same(own.evaluate(run, **more), other.evaluate(stock, **more), f"forwards alone, {more}")
            dist.all_reduce(differing)
            if (setup.options or setup.jitter) and setup.vp is None:
                assert differing, "every step was 1F1B's"
            if setup.timers:
                counted = {timer: own.config.timers[timer].count for timer in ("forward-compute", "backward-compute")}
                assert counted == {timer: other.config.timers[timer].count for timer in counted}
                assert own.config.timers["forward-backward"].count == STEPS + 2
        finally:
            run.close()


def tasks_of(run: Any) -> list[Task]:
    """What this rank ran in the last step, in order."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    spans = [span for span in run.last_result.trace.tasks if span.stage == stage]
    return [span.task for span in sorted(spans, key=lambda span: span.start)]


def check_natural(setup: Setup, tasks: list[Task]) -> None:
    """The microbatches of each kind on each chunk come in order."""
    for kind, v in {(task.kind, task.virtual_stage) for task in tasks}:
        order = [task.microbatch for task in tasks if (task.kind, task.virtual_stage) == (kind, v)]
        assert order == list(range(setup.microbatches)), (kind, v, order)


def one_f_one_b(setup: Setup) -> list[Kind]:
    """The kinds of tasks in the order of Megatron's schedule without interleaving."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    warmup = min(setup.pp - stage - 1, setup.microbatches)
    return [F] * warmup + [F, B] * (setup.microbatches - warmup) + [B] * warmup
