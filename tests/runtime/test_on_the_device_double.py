"""The runtime's own tests, on lanes in front of an asynchronous device: the double on the CPU's memory."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from fork_server import TESTS, Ended, fork_server, run
from on_device import DEPTH
from runtime.toys import TOLERANCE, data, expect, largest_difference, loss_fn, placed, same_bits, stages
from under_torchrun import reports

import rrfp
from rrfp.lab.device_double import DoubleDevice

__all__ = ["fork_server"]

#: Of each kind a test that reads, writes and frees as much as others do.
SOME = (
    "runtime/test_gradients.py::test_gradients_do_not_depend_on_the_limit_and_the_limit_is_kept[2]",
    "runtime/test_ties.py::test_what_was_summed_before_counts_once[objects-True]",
    "runtime/test_memory_ragged.py::test_a_microbatch_larger_than_the_limit_runs_alone",
    "runtime/test_failures.py::test_a_stage_that_raises_is_named_on_every_rank[F-2]",
    "runtime/test_failures.py::test_an_abort_waits_for_no_lane",
)

#: All tests of those kinds, and those with several ranks a stage.
ALL = (
    "runtime/test_gradients.py",
    "runtime/test_chunk_gradients.py",
    "runtime/test_chunks.py",
    "runtime/test_ties.py",
    "runtime/test_ties_between_processes.py",
    "runtime/test_memory_ragged.py",
    "runtime/test_clipping.py",
    "runtime/test_failures.py",
    "runtime/test_torchrun.py",
    "runtime/test_data_parallel.py",
    "runtime/test_dealer.py",
)


def on_double(depth: int, tests: tuple[str, ...], timeout_s: float, *more: str, forks: bool = False) -> Ended:
    """Run tests over the double, with ``more`` options of the plugin; in a new interpreter where they fork others."""
    how = ["-p", "no:xdist", "-p", "no:cacheprovider", "-q", "-p", "on_device", "--device-double", str(depth)]
    command = ["-m", "pytest", *how, *more, "-m", "not long", *(str(TESTS / test) for test in tests)]
    if not forks:
        has_imported = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # the fork server, the plugin
        (ended,) = run(*command, *has_imported, timeout_s=timeout_s, cwd=TESTS.parent)
        return ended
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def run_on_double(depth: int, tests: tuple[str, ...], timeout_s: float, *, forks: bool = False) -> None:
    done = on_double(depth, tests, timeout_s, forks=forks)
    assert done.code == 0, str(done)[-10_000:]
    found = re.search(rf"device double: depth {depth}, (\d+) ranks", done.output)
    assert found is not None
    assert int(found[1]) >= len(tests)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_some_of_the_runtimes_tests_hold_on_a_device() -> None:
    run_on_double(2, SOME, timeout_s=140)


GRADIENTS = "test_gradients.py::test_gradients_do_not_depend_on_the_limit_and_the_limit_is_kept[2]"
CALLER = "test_on_the_device_double.py::test_a_callers_work_reaches_the_step_and_an_error_names_its_task"


@pytest.mark.long
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("lane", "test", "problem"),
    [
        ("CompleteAtReturn", GRADIENTS, "assert nan < "),
        ("NoAdopt", GRADIENTS, "were freed before it was complete"),
        ("ManyStreams", GRADIENTS, "without waiting for it"),
        ("NoFence", CALLER, "assert nan == "),
    ],
)
def test_the_runtimes_tests_fail_on_a_wrong_lane(lane: str, test: str, problem: str) -> None:
    done = on_double(2, (f"runtime/{test}",), 140, "--device-lane", lane)
    assert done.code == 1, str(done)[-10_000:]
    assert problem in done.output, done.output[-8000:]


@pytest.mark.long
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_runtimes_tests_hold_on_a_device(depth: int) -> None:
    run_on_double(depth, ALL, timeout_s=1800, forks=True)


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_groups_and_replicas_run_their_collectives_in_order_on_a_device(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a group run inside its tasks, and those of replicas on a lane beside that of the tasks."""
    monkeypatch.setenv(DEPTH, str(depth))
    found = reports("runtime/torchrun_tensor_parallel.py", "double", ranks=4, timeout_s=180)
    for report in found:
        assert len(report["worst"]) == 4
        assert {name: gap for name, gap in report["worst"].items() if not gap < TOLERANCE} == {}
    assert sum(report["disagreements"] for report in found) > 0  # else members saw the same anyway


@pytest.mark.parametrize("options", [{}, {"split": True}, {"placement": "v"}, {"limit": 1}], ids=str)
def test_stages_that_share_a_device_compute_the_references_bits(options: dict[str, Any]) -> None:
    """Deterministic training of two stages, whose work the device runs in any order that it may choose."""
    count, slow = 4 if "placement" in options else 2, random.Random(7)
    actual, expected, batch = stages(count), stages(count), data(5)
    parts: list[Any] = placed(actual, 2, "v") if count == 4 else list(actual)
    with DoubleDevice(lambda _: slow.choice((0.0, 0.001, 0.003))) as device:
        with rrfp.local(
            parts, loss_fn=loss_fn, device=device, deterministic=True, hint="bfw", **options
        ).blocking() as pipe:
            losses = [pipe.step(batch.inputs, batch.targets).loss for _ in range(2)]
        assert device.problems == []
    assert losses == [expect(expected, batch, step=number).loss for number in range(2)]
    assert same_bits(actual, expected)


def test_a_callers_work_reaches_the_step_and_an_error_names_its_task() -> None:
    actual, expected, batch = stages(2), stages(2), data(4)
    slow: list[float] = []
    with (
        DoubleDevice(lambda _: slow.pop() if slow else 0.002) as device,
        rrfp.local(actual, loss_fn=loss_fn, device=device).blocking() as pipe,
    ):
        slow.append(0.2)  # so that a task without a fence comes before the caller's work, however late the host is
        with torch.no_grad(), device.current_stream().issuing():
            for parameter in (p for module in actual for p in module.parameters()):
                parameter.mul_(1.5)
        with torch.no_grad():
            for parameter in (p for module in expected for p in module.parameters()):
                parameter.mul_(1.5)
        assert pipe.step(batch.inputs, batch.targets).loss == pytest.approx(expect(expected, batch).loss)
        assert largest_difference(actual, expected) < TOLERANCE
        assert device.problems == []
        device.fail(after=3)
        with pytest.raises(rrfp.errors.PipelineAborted, match="failed on the device, as asked for") as raised:
            pipe.step(batch.inputs, batch.targets)
        assert raised.value.origin.task is not None
    assert device.problems == []


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_device_whose_every_call_fails_ends_a_step_in_order(depth: int) -> None:
    """Whoever holds what the lanes have adopted, nothing of it is freed."""
    batch = data(4)
    with (
        DoubleDevice(0.001) as device,
        rrfp.local(stages(2), loss_fn=loss_fn, device=device, depth=depth).blocking() as pipe,
    ):
        pipe.step(batch.inputs, batch.targets)
        device.fail(after=5, everywhere=True)
        with pytest.raises(rrfp.errors.PipelineAborted, match="failed on the device, as asked for") as raised:
            pipe.step(batch.inputs, batch.targets)
        assert raised.value.origin.task is not None
    assert device.problems == []


def test_a_device_whose_calls_hold_the_interpreters_lock_computes_the_same() -> None:
    actual, expected, batch = stages(2), stages(2), data(4)
    with DoubleDevice(0.001, locked_s=0.002, can_pin=False) as device:
        with rrfp.local(actual, loss_fn=loss_fn, device=device).blocking() as pipe:
            loss = pipe.step(batch.inputs, batch.targets).loss
        assert device.problems == []
    assert loss == pytest.approx(expect(expected, batch).loss)
    assert largest_difference(actual, expected) < TOLERANCE
