"""RRFP in torchtitan: its names of schedules, and its trainer, whose steps are those of one process.

The trainer runs as it is, on processes of gloo; `titan_on_cpu` says what it lacks on a CPU.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from fork_server import fork_server, reports
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from rrfp.errors import ConfigError
from rrfp.integrations.torch import ScheduleRRFP
from rrfp.integrations.torchtitan import schedule_class

__all__ = ["fork_server"]

needs_torchtitan = pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")


@pytest.mark.parametrize("name", ["RRFP", "rrfp"])
def test_rrfp_is_a_schedule(name: str) -> None:
    assert issubclass(schedule_class(name), ScheduleRRFP)


@pytest.mark.parametrize(("name", "wanted"), [("1F1B", Schedule1F1B), ("interleaved1f1b", ScheduleInterleaved1F1B)])
def test_other_names_are_torchs(name: str, wanted: type) -> None:
    assert schedule_class(name) is wanted
    assert schedule_class(name, split=True) is wanted


def test_options_are_the_class_s_defaults() -> None:
    made = schedule_class("RRFP", split=True, limit="n")
    assert issubclass(made, ScheduleRRFP)
    assert made.defaults == {"split": True, "limit": "n"}


def test_an_unknown_name_is_refused_with_all_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"schedule is 'RFP', must be 'RRFP' or .*'1F1B'.*'DualPipeV'"):
        schedule_class("RFP")


def run(*cases: str, ranks: int) -> None:
    lines = reports("integrations/titan_ranks.py", *cases, ranks=ranks, timeout_s=170)
    failed = [f"rank {line['rank']}: {case}\n{line[case][-3000:]}" for line in lines for case in cases if line[case]]
    assert not failed, "\n".join(failed)


@needs_torchtitan
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_trainer_on_two_ranks() -> None:
    run("three_steps", "collectives_in_tasks_are_refused", ranks=2)


@needs_torchtitan
@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", ["gradients_in_any_order", "one_stage_a_rank", "split_backward"])
def test_the_trainer_otherwise_on_two_ranks(case: str) -> None:
    run(case, ranks=2)


@needs_torchtitan
@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_trainer_with_fsdp_on_two_by_two_ranks() -> None:
    run("sharded_by_fsdp", ranks=4)
