"""`replay=FOLDER`: a pipeline runs a logged step again, in its executed order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.shell import rrfp as command
from runtime.group_programs import MESH, programs, steps
from runtime.ranks import ThreadedRanks
from runtime.test_natural_order import Shuffle, orders
from runtime.toys import Data, data, loss_fn, placed, same_bits, stages
from sim.adversaries import Worst
from torch import nn

import rrfp
from rrfp.costs import make_costs
from rrfp.errors import ConfigError
from rrfp.lab.simulation import simulate
from rrfp.model.tasks import Task
from rrfp.model.topology import Topology
from rrfp.trace.event_log import log_path, read_event_log, read_executed

OPTIONS: dict[str, Any] = {"loss_fn": loss_fn, "placement": "v", "split": True}


def ran(modules: Sequence[nn.Module], batch: Data, **options: Any) -> tuple[tuple[float, ...], list[list[Task]]]:
    """The losses of a step of two stages, and the order of tasks on each."""
    with rrfp.local(placed(modules, 2, "v"), **{**OPTIONS, **options}) as pipe:
        result = pipe.step(batch.inputs, batch.targets)
    return result.losses, list(orders(result, 2))


def logged(
    folder: Path, microbatches: int = 7, **options: Any
) -> tuple[list[nn.Module], tuple[float, ...], list[list[Task]]]:
    modules = stages(4)
    return modules, *ran(modules, data(microbatches), hint=Shuffle(), limit=5, event_log=folder, **options)


def test_the_same_order_gives_the_same_bits_and_the_log_of_it_says_so(tmp_path: Path) -> None:
    expected, losses, order = logged(tmp_path / "first")
    assert order != ran(stages(4), data(7))[1]
    actual = stages(4)
    again = ran(actual, data(7), replay=tmp_path / "first", event_log=tmp_path / "second")
    assert again == (losses, order)
    assert same_bits(actual, expected)
    assert read_executed(tmp_path / "second").orders == read_executed(tmp_path / "first").orders
    assert list(map(list, read_executed(tmp_path / "first").orders)) == order


def test_evaluations_of_any_size_run_beside_it(tmp_path: Path) -> None:
    logged(tmp_path)
    batch = data(3)
    with rrfp.local(placed(stages(4), 2, "v"), **OPTIONS, replay=tmp_path) as pipe, torch.no_grad():
        assert len(pipe.evaluate(batch.inputs, batch.targets).losses) == 3


def test_a_group_runs_the_order_of_its_members(tmp_path: Path) -> None:
    first, second = programs(), programs()
    mesh: dict[str, Any] = {"mesh": MESH}
    for parts, options in (
        (first, {"hint": Worst(), "limit": 4, "event_log": tmp_path}),
        (second, {"replay": tmp_path}),
    ):
        outcomes = ThreadedRanks(parts, steps(1), **options, **mesh).join()
        assert [outcome.error for outcome in outcomes] == [None] * 4
    assert [part.ran for part in second] == [part.ran for part in first]


def test_another_number_of_microbatches_is_the_first_difference(tmp_path: Path) -> None:
    logged(tmp_path)
    for microbatches, task in ((5, r"F[56]@\d"), (9, "F7@0")):
        with pytest.raises(rrfp.PipelineAborted, match=rf"cannot go on with {task} on stage 0: microbatches is"):
            ran(stages(4), data(microbatches), replay=tmp_path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"placement": "looped"},
            r"cannot go on with \w+@\d on stage 0: the stage of each virtual stage is \(0, 1, 0, 1\)",
        ),
        ({"split": False}, r"cannot go on with W\d@\d on stage 0: split, by virtual stage, is \(False, "),
        ({"hint": "bf"}, "replay runs a logged step to the letter: it goes without hint"),
        ({"strict": "zb-v", "limit": 3}, "it goes without strict and limit"),
        ({"order": "natural"}, "order is 'natural', must be 'free' with replay"),
        ({"replay": 3}, "replay is 3, must be a folder, or None"),
        ({"replay": "nowhere"}, "nowhere/events-rank0.jsonl: cannot be read"),
    ],
)
def test_what_differs_from_the_log_is_refused_before_any_step(options: Any, reason: str, tmp_path: Path) -> None:
    logged(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        rrfp.local(placed(stages(4), 2, "v"), **{**OPTIONS, "replay": tmp_path, **options})


def test_a_forced_order_that_the_step_did_not_keep_is_named_with_its_task(tmp_path: Path) -> None:
    logged(tmp_path)
    options = {**OPTIONS, "replay": tmp_path, "deterministic": True}
    with pytest.raises(
        ConfigError, match=r"cannot go on with W\d@\d on stage \d: it ran before W\d@\d, and this pipeline"
    ):
        rrfp.local(placed(stages(4), 2, "v"), **options)


def test_a_run_that_failed_replays_its_last_whole_step(tmp_path: Path) -> None:
    batch, modules = data(4), stages(4)

    def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if torch.equal(target, wrong.targets[2]):
            raise ArithmeticError
        return loss_fn(output, target)

    wrong = data(4, seed=1)
    options = {**OPTIONS, "loss_fn": failing, "hint": Shuffle(), "event_log": tmp_path}
    with suppress(rrfp.PipelineAborted), rrfp.local(placed(modules, 2, "v"), **options) as pipe:
        result = pipe.step(batch.inputs, batch.targets)
        pipe.step(wrong.inputs, wrong.targets)
    assert read_executed(tmp_path).name == f"{tmp_path}, step 0"
    assert ran(stages(4), batch, replay=tmp_path)[1] == list(orders(result, 2))
    for rank in range(2):  # and where that is not in the logs
        path = log_path(tmp_path, rank)
        lines = path.read_text().splitlines(keepends=True)
        second = [number for number, line in enumerate(lines) if line.startswith('{"known"')][1]
        path.write_text("".join((lines[0], *lines[second:])))
    with pytest.raises(
        ConfigError, match=r"no training step that all stages have run whole: in step 1 stage 0 had not"
    ):
        read_executed(tmp_path)


def test_logs_of_two_runs_are_refused(tmp_path: Path) -> None:
    logged(tmp_path)
    own = log_path(tmp_path, 1).read_text()
    logged(tmp_path, 6)
    log_path(tmp_path, 1).write_text(own)
    with pytest.raises(ConfigError, match="the logs of stages 0 and 1 are of different runs, must be of one: a killed"):
        read_executed(tmp_path)
    for rank in range(2):  # as an older version has written them
        path = log_path(tmp_path, rank)
        head, rest = path.read_text().split("\n", 1)
        path.write_text("\n".join([json.dumps({**json.loads(head), "job": None}), rest]))
    with pytest.raises(ConfigError, match="step 0 is another one in the logs of stages 0 and 1"):
        read_executed(tmp_path)


def test_a_run_that_is_left_writes_its_log_and_a_replay_says_what_it_is(tmp_path: Path) -> None:
    logged(tmp_path)
    assert read_event_log(log_path(tmp_path, 0)).why == "the pipeline was left"
    with rrfp.local(placed(stages(4), 2, "v"), **OPTIONS, replay=tmp_path) as pipe:
        assert f"replay {tmp_path}" in repr(pipe)
        state = pipe.state_dict()
        assert (state["strict"], state["hint"], state["limit"]) == ("replay", None, None)


def test_a_log_of_another_layout_of_ranks_is_refused(tmp_path: Path) -> None:
    logged(tmp_path)
    with pytest.raises(ConfigError, match=r"number of ranks of rank 0 is 3, was 2 in .*events-rank0.jsonl"):
        read_executed(tmp_path, Topology(0, 3))


def test_the_simulator_takes_the_folder_as_a_schedule(tmp_path: Path) -> None:
    _, _, order = logged(tmp_path)
    costs = ("--profile", "llm", "--stages", "2", "--chunks", "2", "--placement", "v", "--split")
    result = command("sweep", *costs, "--microbatches", "7", "--strict", tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{tmp_path}, step 0" in result.stdout
    wrong = command("sweep", *costs, "--microbatches", "8", "--strict", tmp_path)
    assert wrong.exit_code == 2
    assert "cannot go on with F7@0 on stage 0: microbatches is 8, was 7 in the log" in wrong.stderr
    simulation = simulate(make_costs("llm", 2, 7, chunks=2, placement="v", split=True), strict=read_executed(tmp_path))
    assert [[span.task for span in spans] for spans in simulation.result.spans] == order
