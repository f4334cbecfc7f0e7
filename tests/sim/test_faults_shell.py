"""The same fault plans through the real shell in virtual time: its ranks finish with the right values, or all end.

Half of the runs are over a transport that refuses messages out of number, as `zmq` does; in the other half they reach
the shell, whose core numbers nothing there: outputs that change places are then harmless, since each names its task. A
message that is lost without a trace cannot be told from a slow one. The watchdog says, again and again, who waits for
it; the harness cuts such a run off.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from batches import batches
from sim.fault_cases import FORWARD, TRAIN, credit, output, scenario
from sim.fault_shell import ShellRun, run_shell

from rrfp.errors import PipelineAborted
from rrfp.lab.faults.faults import ClaimMessageId, Death, Delay, Duplicate, Fault, Lose, MessageFault, Pause, name_of
from rrfp.lab.faults.random_scenario import RandomClaimFaults
from rrfp.lab.faults.scenario import Scenario
from rrfp.model.tasks import Mode
from rrfp.testing.faults import REQUIRED, Ending, make_scenario

NUM_SEEDS, QUICK = 400, 100
BATCH = 50

#: How a run with this fault alone may end: over a transport that checks, and over one that does not. A copy that comes
#: after the last step harms nobody, because the ranks have left by then.
CREDIT = {
    "lose credit": ({"stalled"}, {"stalled"}),
    "duplicate credit": ({"aborted", "finished"}, {"aborted", "finished"}),
    "swap credit": ({"finished"}, {"finished"}),
    "delay credit": ({"finished"}, {"finished"}),
    "delay copy credit": ({"aborted", "finished"}, {"aborted", "finished"}),
}
ALLOWED = {
    "none": ({"finished"}, {"finished"}),
    "spike": ({"finished"}, {"finished"}),
    "death": ({"aborted", "finished"}, {"aborted", "finished"}),
    "lose": ({"aborted", "stalled"}, {"stalled"}),
    "duplicate": ({"aborted", "finished"}, {"aborted", "finished"}),
    "swap": ({"aborted", "finished"}, {"finished"}),
    "delay": ({"aborted", "finished"}, {"finished"}),
    "delay copy": ({"aborted", "finished"}, {"aborted", "finished"}),
    **CREDIT,
}


@contextmanager
def watchdog_lines() -> Iterator[list[str]]:
    """What the watchdog logs meanwhile."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, listener = logging.getLogger("rrfp.runtime.stall.watchdog"), Listener()
    logger.addHandler(listener)
    try:
        yield lines
    finally:
        logger.removeHandler(listener)


def faults_of(one: Scenario) -> list[Fault]:
    return [fault for fault in one.faults if not isinstance(fault, Pause)]


def ending(run: ShellRun) -> str:
    return "stalled" if run.stalled else "aborted" if run.errors else "finished"


def problems(one: Scenario, run: ShellRun, lines: list[str], *, checks: bool) -> list[str]:
    """What is wrong with how ``run`` ended."""
    found, faults = list(run.problems), faults_of(one)
    names = [name_of(fault) for fault in faults] or ["none"]
    places = [ALLOWED[name][0 if checks else 1] for name in names]
    allowed = set().union(*places) - ({"finished"} if any("finished" not in place for place in places) else set())
    dead = {fault.rank for fault in faults if isinstance(fault, Death)}
    if ending(run) not in allowed and not (ending(run) == "finished" and dead):
        found.append(f"with {names} it must not end {ending(run)}: {run.errors}")
    guilty: set[int] = dead | {f.message.receiver for f in faults if isinstance(f, MessageFault)}
    for stage, error in run.errors.items():
        if run.stalled or stage in dead:
            continue  # cut off by the harness, or gone
        if not isinstance(error, PipelineAborted) or error.origin.stage not in guilty:
            found.append(f"stage {stage} ended with {error!r}")
    if ending(run) == "aborted" and not run.errors.keys() | dead >= {*range(one.graph.placement.stages)} and not dead:
        found.append(f"only stages {[*run.errors]} ended")
    if run.stalled and not any("message(s) are in flight; stage " in line for line in lines):
        found.append(f"it stalled, and nobody says what for: {lines}")
    return found


@pytest.mark.parametrize("first", batches(NUM_SEEDS, BATCH, QUICK))
@pytest.mark.parametrize("checks", [True, False], ids=["checked", "unchecked"])
def test_every_shell_run_ends_well_or_names_its_fault(first: int, checks: bool) -> None:
    endings: Counter[str] = Counter()
    for seed in range(first, first + BATCH):
        one = make_scenario(seed, alone=True)
        with watchdog_lines() as lines:
            run = run_shell(one, checks=checks)
        endings[ending(run)] += 1
        found = problems(one, run, lines, checks=checks)
        assert not found, f"seed {seed}: {found[0]}; make_scenario({seed}, alone=True)"
    assert set(endings) == {"finished", "aborted", "stalled"}


def test_the_watchdog_names_a_lost_output_and_who_owes_it() -> None:
    with watchdog_lines() as lines:
        run = run_shell(scenario(Lose(output("F1@0", 0, 1))), checks=False)
    assert run.stalled
    assert "1 message(s) are in flight; stage 0 waits for: B1@0 (B1@1 owed by stage 1); " in lines[0]
    assert "stage 1 waits for: F1@1 (F1@0 owed by stage 0)" in lines[0]


def test_the_watchdog_names_a_lost_credit_and_who_owes_it() -> None:
    with watchdog_lines() as lines:
        run = run_shell(scenario(Lose(credit("F1@0", 1, 0)), steps=((FORWARD, 3),)), checks=False)
    assert run.stalled
    assert "1 message(s) are in flight; stage 0 waits for: the credit for F1@0 (owed by stage 1)" in lines[0]


@pytest.mark.parametrize(
    ("checks", "cause"),
    [
        (True, "FrameError: bad frame from rank 0: sequence: is 1, must be 2"),
        (False, "ProtocolError: F1@0 arrived twice on stage 1 in step 0 (train, 3 microbatches)"),
    ],
)
def test_every_rank_is_told_of_a_repeated_output_and_by_whom_it_was_refused(checks: bool, cause: str) -> None:
    run = run_shell(scenario(Duplicate(output("F1@0", 0, 1), lag=0.0), steps=((TRAIN, 3),)), checks=checks)
    assert {stage: str(error) for stage, error in run.errors.items()} == {
        0: f"aborted by stage 1: {cause}",
        1: f"aborted by stage 1: {cause}",
    }


# Replicas that share forwards. Over a transport that does not check, their messages reach the cores as in the campaign.


def shared_scenario(seed: int) -> Scenario | None:
    """The run of a seed whose replicas share forwards, without faults; None where a caller has no microbatch."""
    one = make_scenario(seed)
    if one.shared is None:
        return None
    homes = tuple(tuple(sorted(each)) for each in one.shared.homes)
    trained = [set(each) for each, step in zip(homes, one.steps, strict=True) if step.mode is Mode.TRAIN]
    if any(len(each) < one.parallelism.replicas for each in trained):
        return None
    return replace(one, shared=replace(one.shared, homes=homes), faults=())


def allowed_of_shared(fault: Fault, run: ShellRun) -> set[str]:
    """How a run with this fault alone may end."""
    names = {Ending.FINISHED: "finished", Ending.STALLED: "stalled"}
    allowed = {names.get(end, "aborted") for end in REQUIRED[name_of(fault)]}
    # A copy that comes after the last step harms nobody: the ranks have left.
    comes_late = isinstance(fault, Duplicate) or (isinstance(fault, Delay) and fault.is_copy)
    return allowed | {"finished"} if comes_late or fault not in run.applied else allowed


def problems_of_shared(one: Scenario, run: ShellRun, fault: Fault) -> list[str]:
    """What is wrong with how ``run``, with ``fault`` alone, ended."""
    found = list(run.problems)
    if ending(run) not in allowed_of_shared(fault, run):
        found.append(f"it must not end {ending(run)}: {run.errors}")
    if ending(run) != "aborted":
        return found
    dead = {fault.rank} if isinstance(fault, Death) else set[int]()
    guilty = fault.message.receiver if isinstance(fault, MessageFault) else min(dead, default=None)
    if run.errors.keys() | dead != {*one.ranks}:
        found.append(f"only ranks {[*run.errors]} ended")
    for rank, error in run.errors.items():
        if rank not in dead and (not isinstance(error, PipelineAborted) or error.origin.rank != guilty):
            found.append(f"rank {rank} ended with {error!r}")
    return found


@pytest.mark.parametrize("first", batches(3_000, 500, 500))
def test_every_shell_run_whose_replicas_share_forwards_ends_well_or_names_its_fault(first: int) -> None:
    endings: Counter[str] = Counter()
    for seed in range(first, first + 500):
        if (one := shared_scenario(seed)) is None:
            continue
        without = run_shell(one, checks=False)
        assert (ending(without), without.problems) == ("finished", []), f"seed {seed}: {without}"
        rng = random.Random(seed)
        for fault in RandomClaimFaults(rng, one, without.sent).draw()[:1]:
            if isinstance(fault, Pause):
                continue
            run = run_shell(replace(one, faults=(fault,)), checks=False)
            endings[ending(run)] += 1
            found = problems_of_shared(one, run, fault)
            assert not found, f"seed {seed}, {fault}: {found[0]}"
    assert set(endings) == {"finished", "aborted", "stalled"}


@pytest.mark.parametrize("drops", [True, False])
def test_whichever_message_of_a_shared_forward_is_under_way_a_rank_that_dies_is_named(*, drops: bool) -> None:
    one = next(each for seed in range(1000) if (each := shared_scenario(seed)) is not None and len(each.limits) == 2)
    for time, message in run_shell(one, checks=False).sent:
        if isinstance(message, ClaimMessageId):
            for rank in (message.sender, message.receiver):
                death = Death(rank, time, detection=0.5 * one.control_latency, drops=drops)
                run = run_shell(replace(one, faults=(death,)), checks=False)
                assert ending(run) == "aborted"
                assert not problems_of_shared(one, run, death), death
