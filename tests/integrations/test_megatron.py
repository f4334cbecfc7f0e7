"""RRFP in the place of Megatron-core's pipelined schedules: its bits, and what it refuses.

Megatron's model, wrapper and optimizer run as they are, on processes of gloo; examples/megatron_on_cpu.py says what
they lack on a CPU. Megatron is imported in those processes only.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import under_torchrun
from fork_server import fork_server, printed
from torch import nn

from rrfp.errors import ConfigError, Origin, PipelineAborted
from rrfp.integrations.megatron.checks import REFUSED, check_config, check_groups, check_model, check_options
from rrfp.integrations.megatron.errors import MegatronConfigError, MegatronPipelineAborted, as_runtime_error
from rrfp.integrations.megatron.gradient_sync import GradientSync, ParameterSync
from rrfp.integrations.megatron_switch import options_of

__all__ = ["fork_server"]

needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

#: Cases by ranks: those that stand for the rest.
QUICK = {
    2: (
        *("pp2 free", "pp2 vp2 free", "fused, deferred", "overwriting vp2", "enabled_and_disabled", "forms_of_losses"),
        *("signatures_of_all_versions", "flags_are_refused", "iterator_that_ends_early", "without_a_launcher"),
        *("reruns_of_a_step", "autocast_around_forwards"),
    ),
    4: ("cp2 vp2 free", "tp2 vp2 sequence free", "sharded optimizer, vp2 free", "any_number_of_microbatches"),
}
OTHER_BEHAVIOUR = (
    *("without_pipeline_parallelism", "groups_of_the_caller", "iterators_are_counted", "error_of_the_callers_code"),
    *("lengths_of_any_kind", "orders_do_not_matter", "output_without_gradient", "a_list_of_tensors_is_refused"),
    *("finalize_runs_on_the_callers_thread", "several_models"),
    *("one_module_in_two_places", "first_microbatches_are_flagged", "inputs_are_read_only"),
    "one_chunk_in_lists",
)
OTHER_BEHAVIOUR_ON_4 = ("two_runs_are_alike", "batches_are_broadcast_inside_tasks")
#: Every case of `megatron_cases.CASES` that is not above.
OTHER_ON_2 = (
    *("pp2", "pp2 vp2", "overlap", "overlap vp2 free", "align", "align vp2 free", "per token", "experts"),
    *("several tokens", "bf16", "fp16", "recompute full", "recompute selective", "ragged", "ragged vp2 delayed"),
    *("delayed", "uneven", "embedding counted", "layout", "deallocated", "fused", "timers", "dropout", "overwriting"),
)
OTHER_ON_4 = (
    *("pp4 tied", "pp4 vp2", "pp4 vp2 free", "tp2 sequence", "dp2", "dp2 overlap", "sharded optimizer"),
    *("sharded optimizer, gathering", "sharded optimizer, bf16", "sharded optimizer, vp2 aligned", "per token dp2"),
    *("experts tp2", "experts ep2", "experts ep2 free", "experts ep2 sharded", "recompute partly"),
    *("cp2", "experts cp2 ep2 free", "dropout tp2"),
)
OTHER_ON_8 = ("tp2 cp2 free",)


def run(jobs: Mapping[int, Sequence[str]]) -> None:
    """Cases by ranks, in processes forked from one."""
    output = printed(Path(__file__).parent / "megatron_ranks.py", json.dumps(jobs), timeout_s=290)
    lines = list(map(json.loads, output.splitlines()))
    ran = [(ranks, rank, cases) for ranks, cases in jobs.items() for rank in range(ranks)]
    failed = []
    for line, (ranks, rank, cases) in zip(lines, ran, strict=True):
        assert line.keys() == {"rank", *cases}
        assert line["rank"] == rank
        failed += [f"rank {rank} of {ranks}: {case}\n{line[case][-3000:]}" for case in cases if line[case]]
    assert not failed, "\n".join(failed)


@needs_megatron
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bits_are_megatrons() -> None:
    run(QUICK)


@needs_megatron
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("start", range(0, len(OTHER_ON_2), 12))
def test_on_two_ranks_all_other_bits_are_megatrons(start: int) -> None:
    run({2: OTHER_ON_2[start : start + 12]})


@needs_megatron
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("start", range(0, len(OTHER_ON_4), 8))
def test_on_four_ranks_all_other_bits_are_megatrons(start: int) -> None:
    run({4: OTHER_ON_4[start : start + 8]})


@needs_megatron
@pytest.mark.long
@pytest.mark.timeout(300)
def test_on_eight_ranks_all_other_bits_are_megatrons() -> None:
    run({8: OTHER_ON_8})


@needs_megatron
@pytest.mark.long
@pytest.mark.timeout(300)
def test_it_behaves_as_megatrons_schedules_do() -> None:
    run({2: OTHER_BEHAVIOUR, 4: OTHER_BEHAVIOUR_ON_4})


@needs_megatron
@pytest.mark.long
@pytest.mark.timeout(300)
def test_whoever_is_killed_the_others_end_and_name_it() -> None:
    seeds = list(map(str, range(30)))
    output = printed(Path(__file__).parent / "megatron_kills.py", *seeds, timeout_s=290)
    kills = list(map(json.loads, output.splitlines()))
    assert len(kills) == len(seeds)
    for kill in kills:
        victim, raised = kill["victim"], kill["raised"]
        assert [(name, rank) for name, rank, _ in raised] == [("MegatronPipelineAborted", victim)] * 3, kill
    assert len({kill["victim"] for kill in kills}) == 4


def test_every_case_is_run() -> None:
    cases, behaviour = (
        ast.parse((Path(__file__).parent / f"megatron_{name}.py").read_text(encoding="utf-8")).body
        for name in ("cases", "behaviour")
    )
    assigned = {ast.unparse(node.targets[0]): node.value for node in cases if isinstance(node, ast.Assign)}
    assert isinstance(assigned["CASES"], ast.Dict)
    names = [ast.literal_eval(key) for key in assigned["CASES"].keys if key is not None]
    functions = [node for node in behaviour if isinstance(node, ast.FunctionDef) and not ast.unparse(node.args)]
    names += [node.name for node in functions if node.name != "started_by_a_variable"]
    of_ranks = (OTHER_ON_2, OTHER_ON_4, OTHER_ON_8, OTHER_BEHAVIOUR, OTHER_BEHAVIOUR_ON_4)
    assert sorted(names) == sorted(name for every in (*QUICK.values(), *of_ranks) for name in every)


# The environment variable.


@needs_megatron
@pytest.mark.slow
def test_the_variable_enables_it_when_megatrons_schedules_are_imported() -> None:
    program = (
        "import sys, torch; assert 'megatron.core' not in sys.modules; sys.path.insert(0, 'tests')\n"
        "from megatron.core.pipeline_parallel import schedules\n"
        "made = schedules.forward_backward_pipelining_with_interleaving\n"
        "assert made is schedules.forward_backward_pipelining_without_interleaving\n"
        "print(type(made).__name__, made._limit)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "RRFP_MEGATRON": '{"limit": "2n"}'},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == "MegatronSchedule 2n\n", done.stderr


@needs_megatron
@pytest.mark.long
@pytest.mark.timeout(120)
def test_the_variable_reaches_every_rank_of_a_script_that_knows_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RRFP_MEGATRON", "1")
    lines = under_torchrun.reports("integrations/megatron_ranks.py", "started_by_a_variable", ranks=2, timeout_s=110)
    assert [line["started_by_a_variable"] for line in lines] == ["", ""]


def test_the_variable_is_1_or_options() -> None:
    assert options_of("1") == {}
    assert options_of('{"limit": "2n"}') == {"limit": "2n"}
    for wrong in ("yes", "[1]", "2n"):
        with pytest.raises(ValueError, match=r"RRFP_MEGATRON is .*, must be 1, 0, or the options of enable\(\)"):
            options_of(wrong)


# What is refused.


@pytest.mark.parametrize("name", REFUSED)
def test_flags_that_it_does_not_run_are_refused_by_name(name: str) -> None:
    check_config(SimpleNamespace(**{name: False}))
    check_config(SimpleNamespace(**{name: None}))
    with pytest.raises(ConfigError, match=rf"{name} is .*, must be off with RRFP: "):
        check_config(SimpleNamespace(**{name: True}))


def test_all_flags_that_are_on_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)delay_wgrad_compute.*cuda_graph_impl.*gtp_weight_remat_size is 2"):
        check_config(SimpleNamespace(cuda_graph_impl="local", delay_wgrad_compute=True, gtp_weight_remat_size=2))
    check_config(SimpleNamespace(cuda_graph_impl="none", gtp_weight_remat_size=1))


@pytest.mark.parametrize("name", ["order", "strict", "replay", "split", "chunks", "loss_fn", "seed", "share_replicas"])
def test_options_that_megatron_decides_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must not be passed: "):
        check_options({name: None})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"limits": "2n"}, r"unknown option 'limits' \(did you mean 'limit'\?\)"),
        ({"hint": "foo"}, "hint is 'foo', must be one of"),
        ({"hint": "slot-aware-pyramid"}, "hint is 'slot-aware-pyramid', which orders microbatches itself"),
        ({"topology": None, "stall_after": -1, "seed": 1}, "(?s)seed must not.*option 'topology'.*stall_after is -1"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_there_is_a_model(options: dict[str, Any], match: str) -> None:
    check_options({"limit": "2n", "transport": "shm"})
    with pytest.raises(ConfigError, match=match):
        check_options(options)


def test_limits_count_microbatches() -> None:
    for limit in ("megatron", "n", "2n", 3):
        check_options({"limit": limit})
    with pytest.raises(ConfigError, match="limit is '2GB', must count microbatches"):
        check_options({"limit": "2GB"})
    with pytest.raises(ConfigError, match=r"limit is 'megatrn', must be .*'megatron'"):
        check_options({"limit": "megatrn"})


class FullyShardedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrappers_that_gather_parameters_in_tasks_are_refused() -> None:
    check_model([nn.Linear(1, 1)], None)
    with pytest.raises(ConfigError, match="model is wrapped in FullyShardedDataParallel, must not be"):
        check_model([FullyShardedDataParallel(nn.Linear(1, 1))], None)
    with pytest.raises(ConfigError, match="model has the type encoder_and_decoder, must be encoder_or_decoder"):
        check_model([nn.Linear(1, 1)], SimpleNamespace(name="encoder_and_decoder"))


class MultiModulePipelineCommunicator:
    pass


def test_groups_are_of_one_model_and_complete() -> None:
    check_groups(None, None)
    groups = SimpleNamespace(tp=1, cp=1, pp=1)
    check_groups(SimpleNamespace(), groups)
    with pytest.raises(
        ConfigError, match="p2p_communicator is a MultiModulePipelineCommunicator, must be of one model"
    ):
        check_groups(MultiModulePipelineCommunicator(), groups)
    with pytest.raises(ConfigError, match="pg_collection has no cp, must have tp, cp and pp"):
        check_groups(SimpleNamespace(), SimpleNamespace(tp=1, pp=1))


def test_errors_are_runtime_errors_and_name_the_rank_of_the_job() -> None:
    assert isinstance(as_runtime_error(ConfigError("limit is wrong")), MegatronConfigError)
    error = as_runtime_error(PipelineAborted(Origin(1, None, "KeyError: 'x'", rank=3)), [[0, 4], [1, 5]])
    assert isinstance(error, MegatronPipelineAborted)
    assert str(error).endswith("(global rank 5)")
    assert as_runtime_error(error) is error
    assert issubclass(MegatronConfigError, RuntimeError)
    assert issubclass(MegatronPipelineAborted, RuntimeError)


# When gradients are reduced, and parameters gathered.


class Events(list[str]):
    """What was called, in order."""

    def no_sync(self, name: str = "") -> Any:
        @contextmanager
        def inside() -> Any:
            self.append(f"enter{name}")
            yield
            self.append(f"exit{name}")

        return inside

    def sync(self, name: str) -> Any:
        return lambda parameters: self.append(f"{name} {len(list(parameters))}")


def backwards(sync: GradientSync, events: Events, *chunks: int) -> list[str]:
    for chunk in chunks:
        sync.before_backward(chunk)
        events.append(f"B{chunk}")
        sync.after_backward(chunk)
    sync.close()
    return events


def test_no_sync_is_left_for_the_last_backward() -> None:
    events, chunk = Events(), [nn.Linear(1, 1)]
    config = SimpleNamespace(no_sync_func=events.no_sync(), grad_sync_func=None)
    sync = GradientSync(config, chunk, 2, is_first_stage=False)
    assert backwards(sync, events, 0, 0) == ["enter", "B0", "exit", "B0"]


@pytest.mark.parametrize(
    ("is_first", "wanted"),
    [(True, ["enter", "B0", "exit", "B0"]), (False, ["enter", "B0", "B0", "exit", "reduce 2"])],
)
def test_grad_sync_func_reduces_after_the_last_backward_but_on_the_first_stage(
    is_first: bool, wanted: list[str]
) -> None:
    events, chunk = Events(), [nn.Linear(1, 1)]
    config = SimpleNamespace(no_sync_func=events.no_sync(), grad_sync_func=events.sync("reduce"))
    assert backwards(GradientSync(config, chunk, 2, is_first_stage=is_first), events, 0, 0) == wanted


def test_with_chunks_no_sync_is_left_for_the_last_backward_of_each() -> None:
    events, chunks = Events(), [nn.Linear(1, 1), nn.Linear(1, 1)]
    config = SimpleNamespace(no_sync_func=[events.no_sync("0"), events.no_sync("1")], grad_sync_func=None)
    sync = GradientSync(config, chunks, 2, is_first_stage=True)
    inside, outside = ["enter0", "enter1"], ["exit1", "exit0"]
    order = [*inside, "B1", "B0", *outside, "B1", *inside, *outside, "B0"]
    assert backwards(sync, events, 1, 0, 1, 0) == order


def test_with_chunks_grad_sync_func_reduces_each_after_its_last_backward() -> None:
    events, chunks = Events(), [nn.Linear(1, 1), nn.Linear(1, 1, bias=False)]
    syncs = [events.sync("reduce0"), events.sync("reduce1")]
    config = SimpleNamespace(no_sync_func=events.no_sync(), grad_sync_func=syncs)
    sync = GradientSync(config, chunks, 1, is_first_stage=True)
    assert backwards(sync, events, 1, 0) == ["enter", "B1", "exit", "reduce1 1", "enter", "B0", "exit", "reduce0 2"]


def test_parameters_are_gathered_one_chunk_ahead() -> None:
    events, chunks = Events(), [nn.Linear(1, 1) for _ in range(3)]
    sync = ParameterSync(SimpleNamespace(param_sync_func=[events.sync(f"gather{i}") for i in range(3)]), chunks)
    assert events == ["gather0 2", "gather1 2"]
    sync.ahead_of(1)
    assert events == ["gather0 2", "gather1 2", "gather2 2"]
    sync.ahead_of(2)
    assert len(events) == 3
