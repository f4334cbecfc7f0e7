"""How RRFP behaves in Megatron's place, beside its numbers; every function is a case that runs on all ranks."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from integrations.megatron_cases import FREE, MOE, SEQUENCE, STEPS, laid_out, same
from integrations.megatron_parts import LENGTH, Setup, Trainer
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from torch import Tensor, nn

from rrfp import PipelineAborted
from rrfp.errors import ConfigError
from rrfp.integrations import megatron
from rrfp.integrations.megatron.upstream import PIPELINED, check_signatures, fitted


@contextmanager
def made(**options: Any) -> Iterator[Any]:
    """A function in Megatron's place, whose pipelines end here."""
    run = megatron.forward_backward_func(**options)
    try:
        yield run
    finally:
        run.close()


@contextmanager
def refused(error: type[Exception], match: str) -> Iterator[None]:
    """On every rank, as a RuntimeError too."""
    with pytest.raises(error, match=match) as caught:
        yield
    assert isinstance(caught.value, RuntimeError)


def signatures_of_all_versions() -> None:
    """Those of megatron-core 0.16.1 to 0.19.0 and its main branch can be called; others are refused by name."""
    read = json.loads((Path(__file__).parent / "megatron_signatures.json").read_text(encoding="utf-8"))
    versions = sorted(
        {version for by_signature in read.values() for found in by_signature.values() for version in found}
    )
    assert len(versions) == 5
    arguments = set(signature(schedules.forward_backward_pipelining_with_interleaving).parameters)
    for version in versions:
        program = [
            f"def {name}({parameters}): return locals()"
            for name, by_signature in read.items()
            for parameters, found in by_signature.items()
            if version in found
        ]
        home = ModuleType(version)
        exec("\n".join(program), vars(home))
        check_signatures(home)
        for name in PIPELINED:
            assert set(signature(getattr(home, name)).parameters) == arguments
        taken = fitted(
            home.backward_step, input_tensor=1, output_tensor=2, output_tensor_grad=3, model_type=4, config=5
        )
        assert taken["config"] == 5
    home = ModuleType("later")
    exec("def backward_step(input_tensor, stream, *, config): ...", vars(home))
    with pytest.raises(ConfigError, match=r"(?s)forward_step .*it is missing.*backward_step .* it needs 'stream'"):
        check_signatures(home)
    assert set(signature(megatron.forward_backward_func().__call__).parameters) == arguments


def enabled_and_disabled() -> None:
    """A name that was imported before gives RRFP's function, until it is disabled."""
    setup = Setup()
    with laid_out(setup):
        own = get_forward_backward_func()
        first = megatron.enable()
        assert get_forward_backward_func() is first
        second = megatron.enable(limit="2n")  # with other options, instead
        assert get_forward_backward_func() is second
        trainer, other = Trainer(setup), Trainer(setup)
        seen = trainer.step(get_forward_backward_func(), 0)
        assert second.last_result is not None
        megatron.disable()
        assert get_forward_backward_func() is own
        megatron.disable()
        same(seen, other.step(own, 0), "enabled")


def without_pipeline_parallelism() -> None:
    """Megatron's own function runs, also where RRFP's was passed on."""
    setup = Setup(pp=1, dp=2)
    with laid_out(setup):
        megatron.enable()
        try:
            assert get_forward_backward_func() is schedules.forward_backward_no_pipelining
        finally:
            megatron.disable()
        with made() as run:
            same(Trainer(setup).step(run, 0), Trainer(setup).step(get_forward_backward_func(), 0), "one stage")
            assert run.last_result is None


def groups_of_the_caller() -> None:
    """Process groups that are passed give what the default ones do; one without the other is refused."""
    setup = Setup()
    with laid_out(setup), made() as run:
        trainer = Trainer(setup)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        communicator = P2PCommunicator(pp_group=groups.pp, config=trainer.config)
        both = {"pg_collection": groups, "p2p_communicator": communicator}
        wanted = Trainer(setup).step(run, 0)
        same(trainer.step(run, 0, **both), wanted, "groups")
        with made(pg_collection=groups) as other:
            same(Trainer(setup).step(other, 0), wanted, "groups of the function")
        for name, passed in both.items():
            with refused(ConfigError, f"{name} is passed without"):
                trainer.step(run, 1, **{name: passed})


def flags_are_refused() -> None:
    """By name, at the first call, all at once; without them the same function runs."""
    setup = Setup()
    with laid_out(setup), made() as run:
        trainer = Trainer(setup)
        trainer.config.cuda_graph_impl = "local"
        trainer.config.hybrid_context_parallel = True
        with refused(ConfigError, r"(?s)hybrid_context_parallel is True, must be off.*cuda_graph_impl is 'local'"):
            trainer.step(run, 0)
        trainer.config.cuda_graph_impl, trainer.config.hybrid_context_parallel = "none", False
        trainer.step(run, 0)


def iterators_are_counted() -> None:
    """One for each chunk; chunks that draw from one are refused."""
    setup = Setup(vp=2)
    with laid_out(setup), made() as run:
        trainer = Trainer(setup)
        arguments = trainer.arguments(0)
        one, _ = arguments["data_iterator"]
        for iterators, match in (
            ([one], "data_iterator has 1 iterators, must have one for each model chunk: 2"),
            (one, "data_iterator is a generator, must be a list with one iterator for each of the 2 model chunks"),
        ):
            with refused(ConfigError, match):
                run(**{**arguments, "data_iterator": iterators})
        with refused(PipelineAborted, "draw from one data_iterator, and forwards of chunks run in any order"):
            run(**{**arguments, "data_iterator": [one, one]})


def one_chunk_in_lists() -> None:
    """A model and an iterator may be lists of one, and what says how tensors are shaped changes nothing."""
    setup = Setup()
    with laid_out(setup), made() as run:
        trainer, other = Trainer(setup), Trainer(setup)
        arguments = trainer.arguments(0)
        for name in ("model", "data_iterator"):
            arguments[name] = [arguments[name]]
        shapes = {"adjust_tensor_shapes_fn": lambda *shapes: [(1, 1, 1)] * 2, "decoder_seq_length": 3}
        run(**{**arguments, **shapes, "seq_length": None, "micro_batch_size": None})
        get_forward_backward_func()(**other.arguments(0))
        for mine, theirs in zip(trainer.bare[0].parameters(), other.bare[0].parameters(), strict=True):
            assert torch.equal(mine.main_grad, theirs.main_grad)  # type: ignore[attr-defined]


def iterator_that_ends_early() -> None:
    """Every rank learns on which chunk and at which microbatch, and cannot go on."""
    setup = Setup()
    with laid_out(setup), made() as run:
        trainer = Trainer(setup)
        arguments = trainer.arguments(0)
        if parallel_state.is_pipeline_first_stage():
            arguments["data_iterator"] = islice(arguments["data_iterator"], 4)
        with refused(
            PipelineAborted, r"stage 0, task F4@0: .*data_iterator of chunk 0 ended at microbatch 4.*rank 0\)"
        ):
            run(**arguments)
        with refused(Exception, "this pipeline of a Megatron model ended with .*; call enable"):
            run(**trainer.arguments(1))


def error_of_the_callers_code() -> None:
    """The rank at fault raises with its cause; others name the rank of torch.distributed, stage and task."""
    setup = Setup()
    with laid_out(setup), made() as run:
        trainer = Trainer(setup)
        arguments, own = trainer.arguments(0), trainer.forward_step

        def failing(data_iterator: Any, model: nn.Module) -> Any:
            if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
                raise KeyError("mask")
            return own(data_iterator, model)

        with pytest.raises(RuntimeError, match=r"stage 1, task F0@1: KeyError: 'mask' \(global rank 1\)") as caught:
            run(**{**arguments, "forward_step_func": failing})
        assert isinstance(caught.value, PipelineAborted)
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            assert isinstance(caught.value.__cause__, KeyError)


def lengths_of_any_kind() -> None:
    """Microbatches of other lengths need no ``variable_seq_lengths``, which Megatron's schedule needs."""
    setup = Setup(ragged=True, options=FREE)
    with laid_out(setup), made(**FREE) as run:
        own, other = Trainer(setup), Trainer(setup)
        own.config.variable_seq_lengths = False
        for step in range(2):
            same(own.step(run, step), other.step(get_forward_backward_func(), step), f"step {step}")


def several_models() -> None:
    """Each has a pipeline of its own, and one line in the log; one that is gone is left, the others go on."""
    setup = Setup()
    lines: list[str] = []
    logger, handler = logging.getLogger("rrfp.integrations.megatron"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    with laid_out(setup), made() as run, ExitStack() as stack:
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        models, other = [Trainer(setup), Trainer(setup)], Trainer(setup)
        for step in range(2):
            wanted = other.step(get_forward_backward_func(), step)
            for model in models:
                same(model.step(run, step), wanted, f"step {step}")
        del models[0], model
        same(models[0].step(run, 2), other.step(get_forward_backward_func(), 2), "after one has gone")
        started = "RRFP runs the pipeline of ranks [0, 1], 1 chunk(s) each; connecting took "
        assert [line.startswith(started) for line in lines] == [True] * 2 * (dist.get_rank() == 0), lines


def without_a_launcher() -> None:
    """Nothing but torch's process group says who the ranks are."""
    setup = Setup()
    names = [name for name in os.environ if re.match(r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_|TORCHELASTIC", name)]
    kept = {name: value for name, value in os.environ.items() if name not in names}
    with laid_out(setup), patch.dict(os.environ, kept, clear=True), made() as run:
        same(Trainer(setup).step(run, 0), Trainer(setup).step(get_forward_backward_func(), 0), "no launcher")


def orders_do_not_matter() -> None:
    """Whatever a hint picks, and under any limit, the bits are the same."""
    setup = Setup(vp=2, ties=True)
    with laid_out(setup):
        seen = []
        for options in ({}, FREE, {"hint": "fb", "limit": 1}, {"hint": "b-priority", "limit": "n"}):
            with made(**options) as run:
                trainer = Trainer(setup)
                seen.append([trainer.step(run, step) for step in range(2)])
        for other in seen[1:]:
            for mine, theirs in zip(seen[0], other, strict=True):
                same(mine, theirs, "another order")


def any_number_of_microbatches() -> None:
    """7 on 4 stages of 2 chunks, which Megatron takes in one group of 7 only; fewer than stages, too."""
    for count in (7, 2):
        setup = Setup(pp=4, vp=2, microbatches=count)
        with laid_out(setup), made(limit="2n") as run:
            own = Trainer(setup)
            seen = own.step(run, 0)
            if count == 7:
                with pytest.raises(RuntimeError, match="The remainder of M"):
                    Trainer(setup).step(get_forward_backward_func(), 0)
                other = Trainer(setup)
                other.config.microbatch_group_size_per_vp_stage = count
                same(seen, other.step(get_forward_backward_func(), 0), "7 microbatches")
            elif parallel_state.is_pipeline_last_stage(ignore_virtual=True):
                assert [name for name in seen if name.startswith("loss")] == ["loss 0", "loss 1"]


def two_runs_are_alike() -> None:
    """From the same seed, whatever the delays, hints and limits of each."""
    for setup in (
        Setup(pp=4, vp=2, microbatches=8),
        Setup(tp=2, config=SEQUENCE),
        Setup(tp=2, vp=2, config=MOE | SEQUENCE),
        Setup(dp=2, ep=2, ddp="overlap", shards_optimizer=True, config=MOE),
        Setup(cp=2, ddp="overlap"),
    ):
        with laid_out(setup), made() as first, made(**FREE) as second:
            own, other = Trainer(setup), Trainer(replace(setup, jitter=True))
            for step in range(STEPS):
                same(own.step(first, step), other.step(second, step), f"{setup}, step {step}")
            same(own.evaluate(first), other.evaluate(second), f"{setup}, forwards alone")


def batches_are_broadcast_inside_tasks() -> None:
    """One rank of tensor parallelism draws them and the others have no iterator, as in Megatron's get_batch."""
    setup = Setup(tp=2, vp=2, config=SEQUENCE, options=FREE)

    class Broadcasting(Trainer):
        def arguments(self, step: int) -> dict[str, Any]:
            arguments = super().arguments(step)
            if parallel_state.get_tensor_model_parallel_rank():
                arguments["data_iterator"] = [None] * len(self.chunks)
            return arguments

        def forward_step(self, data_iterator: Any, model: nn.Module, *checkpoints: bool) -> Any:
            tokens = torch.empty(2, LENGTH + 1, dtype=torch.long)
            if data_iterator is not None:
                batch = next(data_iterator)
                tokens = torch.cat([batch["tokens"], batch["labels"][:, -1:]], 1)
            source = parallel_state.get_tensor_model_parallel_src_rank()
            dist.broadcast(tokens, source, group=parallel_state.get_tensor_model_parallel_group())
            return super().forward_step(iter([{"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}]), model)

    with laid_out(setup), made(**FREE) as run:
        own, other = Broadcasting(setup), Trainer(setup)
        for step in range(2):
            same(own.step(run, step), other.step(get_forward_backward_func(), step), f"step {step}")


def reruns_of_a_step() -> None:
    """Megatron's rerun state machine validates the same results in the same order, and a re-run repeats them."""
    setup = Setup(vp=2, options=FREE)

    def validated(run: Callable[..., Any]) -> list[Any]:
        machine, trainer = get_rerun_state_machine(), Trainer(setup)
        calls: list[tuple[int, str, int, float]] = []

        def loss(output: Tensor, non_loss_data: bool = False) -> Any:
            mean = output.mean()
            m = len(calls) % setup.microbatches
            is_odd = (machine.current_iteration, m) == (1, 2)
            machine.validate_result(mean.detach().clone(), lambda result: is_odd, "loss", fatal=False)
            calls.append((machine.current_iteration, machine.state.name, m, mean.item()))
            return mean, {"loss": mean.detach()}

        trainer.loss = loss  # type: ignore[method-assign]
        for step in range(3):
            arguments = trainer.arguments(step)
            arguments["data_iterator"] = [RerunDataIterator(each) for each in arguments["data_iterator"]]
            while machine.should_run_forward_backward(arguments["data_iterator"]):
                for chunk in trainer.chunks:
                    chunk.zero_grad_buffer()
                run(**arguments)
            assert machine.should_checkpoint_and_exit() == (False, False, 0)
            trainer.optimizer.step()
        # The verdict of the rank that validates: the odd result came again.
        assert (machine.suspicious_node is not None) is parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        return calls

    seen = []
    with laid_out(setup), made(**FREE) as own:
        for run in (own, get_forward_backward_func()):
            initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
            try:
                seen.append(validated(run))
            finally:
                destroy_rerun_state_machine()
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    assert seen[0] == seen[1]
    if is_last:
        states = [state for _, state, m, _ in seen[0] if m == 0]
        assert states == ["INITIAL_RUN", "INITIAL_RUN", "RERUNNING_IN_PLACE", "INITIAL_RUN"]
        first, again = ([call[2:] for call in seen[0] if call[:2] == (1, state)] for state in states[1:3])
        assert first == again


class Toy(nn.Module):
    """A linear chunk with what Megatron's schedules ask of a model."""

    def __init__(self, config: Any, *, first: bool) -> None:
        super().__init__()
        self.config, self.first, self.model_type = config, first, None
        torch.manual_seed(3)
        self.linear = nn.Linear(4, 4)
        self.entered: Tensor | None = None
        self.events: list[str] = []

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        (self.entered,) = tensors

    def forward(self, batch: Tensor | None) -> Tensor:
        entered = batch if self.entered is None else self.entered
        assert entered is not None
        return torch.relu(self.linear(entered))


def _toy_step(loss_func: Callable[..., Any] | None, iterator: Any, model: nn.Module) -> Any:
    batch = next(iterator) if iterator is not None else None
    return model(batch), loss_func


def toy_arguments(loss_func: Callable[..., Any] | None, step: Callable[..., Any] = _toy_step) -> dict[str, Any]:
    """Of a call on two stages, 4 microbatches of 3 x 2 x 4 numbers."""
    config = Trainer(Setup(ddp="none")).config
    config.hidden_size = 4
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(3, 2, 4, generator=generator) for _ in range(4)]
    return {
        "forward_step_func": partial(step, loss_func),
        "data_iterator": iter(batches) if first else None,
        "model": Toy(config, first=first),
        "num_microbatches": len(batches),
        "seq_length": 3,
        "micro_batch_size": 2,
    }


def _mean(output: Tensor) -> Any:
    return output.mean(), {"mean": output.detach().mean()}


def _tokens(output: Tensor) -> Any:
    return output.sum(), torch.tensor(3, dtype=torch.int), {"sum": output.detach().sum()}


def _whole(output: Tensor) -> Any:
    return 7, {"seven": torch.tensor(7.0)}


def _any(output: Tensor, non_loss_data: bool = False) -> Any:
    assert non_loss_data
    return output.detach().sum(0).tolist()


def forms_of_losses() -> None:
    """Pairs, triples, whole numbers, other data and none give what they give under Megatron's schedule."""
    setup = Setup(ddp="none")
    forms: list[tuple[Callable[..., Any] | None, dict[str, Any]]] = [
        (_mean, {}),
        (_tokens, {}),
        (_mean, {"forward_only": True}),
        (_whole, {"forward_only": True}),
        (None, {"forward_only": True}),
        (_any, {"forward_only": True, "collect_non_loss_data": True}),
    ]
    with laid_out(setup), made() as run:
        for loss, how in forms:
            own, other = toy_arguments(loss), toy_arguments(loss)
            with torch.set_grad_enabled(not how.get("forward_only")):
                stored, wanted = run(**own, **how), get_forward_backward_func()(**other, **how)
            assert len(stored) == len(wanted)
            assert str(stored) == str(wanted), (loss, how)
            for mine, theirs in zip(own["model"].parameters(), other["model"].parameters(), strict=True):
                assert (mine.grad is None) is (theirs.grad is None) is bool(how.get("forward_only"))
                assert mine.grad is None or (theirs.grad is not None and torch.equal(mine.grad, theirs.grad))


def output_without_gradient() -> None:
    """A stage whose output needs no gradient, as of a batch without images: the stages before get zeros."""
    setup = Setup(ddp="none")

    def step(loss_func: Any, iterator: Any, model: nn.Module) -> Any:
        output = model(next(iterator) if iterator is not None else None)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        return (output.detach() if last else output), loss_func

    with laid_out(setup), made() as run:
        arguments = toy_arguments(_mean, step)
        run(**arguments)
        weight = arguments["model"].linear.weight
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            assert weight.grad is None
        else:
            assert weight.grad is not None
            assert not weight.grad.any()


def autocast_around_forwards() -> None:
    """As ``enable_autocast`` says: tensors between stages are of its type, and the bits Megatron's."""

    def loss(output: Tensor) -> Any:
        assert output.dtype is torch.bfloat16
        return _mean(output)

    with laid_out(Setup(ddp="none")), made() as run:
        models = []
        for each in (run, get_forward_backward_func()):
            arguments = toy_arguments(loss)
            models.append(arguments["model"])
            for name, value in (
                ("enable_autocast", True),
                ("autocast_dtype", torch.bfloat16),
                ("pipeline_dtype", torch.bfloat16),
            ):
                setattr(models[-1].config, name, value)
            each(**arguments)
        for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
            assert mine.grad.any()


def one_module_in_two_places() -> None:
    """As Megatron's own tests pass it: one module for both chunks, ranges that nobody draws from, numbers as losses."""
    with laid_out(Setup(vp=2)), made() as run:
        module, loss = toy_arguments(None)["model"], dist.get_rank()

        def step(iterator: Any, model: nn.Module) -> Any:
            assert iterator == range(100)
            return torch.rand(3, 2, 4), lambda output: (loss, {"loss": loss})

        stored = run(
            forward_step_func=step,
            data_iterator=[range(100), range(100)],
            model=[module, module],
            num_microbatches=4,
            seq_length=3,
            micro_batch_size=2,
            forward_only=True,
        )
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        assert stored == [{"loss": loss}] * 4 * is_last


def first_microbatches_are_flagged() -> None:
    """Before the first forward of each chunk; in a validation only in its first step."""
    setup = Setup(vp=2)

    class Flagged(Toy):
        def set_is_first_microbatch(self) -> None:
            self.events.append("flag")

        def forward(self, batch: Tensor | None) -> Tensor:
            self.events.append("forward")
            return super().forward(batch)

    def events(run: Callable[..., Any], more: dict[str, Any]) -> list[list[str]]:
        arguments = toy_arguments(_mean)
        config, is_first = arguments["model"].config, parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        config.virtual_pipeline_model_parallel_size, config.overlap_p2p_comm = 2, True
        config.microbatch_group_size_per_vp_stage = 2
        chunks = [Flagged(config, first=is_first and not number) for number in range(2)]
        run(**{**arguments, "model": chunks, "data_iterator": [arguments["data_iterator"], None]}, **more)
        return [chunk.events for chunk in chunks]

    with laid_out(setup), made(**FREE) as run:
        for more, flags in (
            ({}, ["flag"]),
            ({"forward_only": True}, ["flag"]),
            ({"forward_only": True, "first_val_step": True}, ["flag"]),
            ({"forward_only": True, "first_val_step": False}, []),
        ):
            seen = events(run, more)
            assert seen == [flags + ["forward"] * 4] * 2, (more, seen)
            assert seen == events(get_forward_backward_func(), more)


def inputs_are_read_only() -> None:
    """A chunk that writes into what came from another stage is an error, by name."""

    def step(loss_func: Any, iterator: Any, model: Any) -> Any:
        if model.entered is not None:
            with torch.no_grad():
                model.entered.mul_(2)
        return _toy_step(loss_func, iterator, model)

    match = r"task F0@1: .*Toy on virtual stage 1 wrote into its input, which comes from another stage"
    with laid_out(Setup(ddp="none")), made() as run, refused(PipelineAborted, match):
        run(**toy_arguments(_mean, step))


def a_list_of_tensors_is_refused() -> None:
    """One tensor goes from stage to stage."""

    def step(loss_func: Any, iterator: Any, model: nn.Module) -> Any:
        return [model(next(iterator) if iterator is not None else None)] * 2, loss_func

    match = "Toy on virtual stage 0 returned a list, must return a tensor"
    with laid_out(Setup(ddp="none")), made() as run, refused(PipelineAborted, match):
        run(**toy_arguments(_mean, step))


def finalize_runs_on_the_callers_thread() -> None:
    """After the last backward, with all chunks and the groups of the call."""
    setup = Setup(ddp="end", vp=2)
    with laid_out(setup), made() as run:
        trainer, seen = Trainer(setup), []

        def finalize(chunks: Any, tokens: Any, pg_collection: Any = None, force_all_reduce: Any = None) -> None:
            seen.append((threading.current_thread(), list(chunks), tokens, force_all_reduce))
            assert pg_collection.pp is parallel_state.get_pipeline_model_parallel_group()

        trainer.config.finalize_model_grads_func = finalize
        run(**trainer.arguments(0), force_all_reduce=True)
        run(**trainer.arguments(0), forward_only=True)
        assert seen == [(threading.current_thread(), trainer.chunks, None, True)]


def started_by_a_variable() -> None:
    """RRFP_MEGATRON was set before torch was imported."""
    setup = Setup()
    with laid_out(setup):
        run = get_forward_backward_func()
        assert type(run).__name__ == "MegatronSchedule"
        trainer = Trainer(setup)
        trainer.step(run, 0)
        assert run.last_result is not None
        megatron.disable()
