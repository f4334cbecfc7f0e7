"""Who reads a failure finds the line at fault: in a traceback on one rank, in one line on every other."""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import long
from runtime.ranks import ThreadedRanks, step, two_steps
from runtime.toys import Bomb, Trap, data, fail_at, loss_fn, stages
from torch import nn
from under_torchrun import run

import rrfp
from rrfp import Topology
from rrfp.compute.rng import SeedNotice
from rrfp.errors import PeerLostError, PipelineAborted
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.runtime.abort import failure_of
from rrfp.transports.rendezvous import LocalRendezvous

PACKAGE = str(Path(rrfp.__file__).parent)


def printed(error: BaseException) -> list[str]:
    """The lines that Python prints of it."""
    return "".join(traceback.format_exception(error)).rstrip().splitlines()


def own_frames(lines: list[str]) -> list[str]:
    return [line for line in lines if line.strip().startswith(f'File "{PACKAGE}')]


@pytest.mark.parametrize("where", ["on_forward", "on_backward"])
def test_the_rank_at_fault_prints_the_users_frames_and_ends_with_the_users_line(where: str) -> None:
    bomb = Bomb(**{where: fail_at(1, Trap("out of luck"))})
    guilty = ThreadedRanks([*stages(1), bomb], two_steps).join()[1].abort
    lines = printed(guilty)
    assert re.fullmatch(r"raised at .*toys\.py:\d+, in check: raise error", lines[-1])
    assert "runtime.toys.Trap: out of luck" in lines
    assert len(own_frames(lines)) == 2  # step(), and what it calls
    assert not any("concurrent/futures" in line or "thread_lane" in line for line in lines)


def test_every_other_rank_prints_its_own_call_and_one_line_that_names_the_fault() -> None:
    modules = [*stages(1), Bomb(fail_at(1, Trap("out of luck")))]
    lines = printed(ThreadedRanks(modules, step).join()[0].abort)
    assert lines[-1] == "rrfp.errors.PipelineAborted: aborted by stage 1, task F1@1: Trap: out of luck"
    assert lines[0] == "Traceback (most recent call last):"
    assert len(own_frames(lines)) == 2
    assert len(lines) <= 16  # of which the test's own helpers have six


def test_a_rank_that_notices_a_lost_peer_prints_one_line_that_names_it() -> None:
    try:
        raise PeerLostError(1, "its process ended")
    except PeerLostError as error:
        lines = printed(failure_of(error, Topology(0, 2)).error())
    assert lines[:-1] == ["rrfp.errors.PipelineAborted: aborted by stage 1: PeerLostError: its process ended"]
    assert lines[-1].startswith("if it was not ended on purpose, look for 'out of memory' in dmesg on its host")
    assert lines[-1].endswith("resume from the newest checkpoint")


def test_ranks_that_make_different_calls_print_their_own_call_alone() -> None:
    def body(stage: int, pipe: BlockingPipeline) -> Any:
        return pipe.step(data(2 + stage).inputs, data(2 + stage).targets)

    for outcome in ThreadedRanks(stages(2), body).join():
        lines = printed(outcome.abort)
        assert lines[0] == "Traceback (most recent call last):"
        assert sum(line.startswith("Traceback") for line in lines) == 1
        assert len(own_frames(lines)) == 2
        assert lines[-1].startswith("rrfp.errors.PipelineAborted: aborted by stage ")
        assert "ProtocolError: stages disagree on the step: " in lines[-1]


async def test_the_async_call_prints_no_more() -> None:
    with pytest.raises(PipelineAborted) as caught:
        async with rrfp.local([*stages(1), Bomb(fail_at(1, Trap("out of luck")))], loss_fn=loss_fn) as pipe:
            await pipe.step(data(2).inputs, data(2).targets)
    lines = printed(caught.value)
    assert lines[-1].startswith("raised at ")
    assert len(own_frames(lines)) == 2


def test_an_error_of_the_runtime_itself_keeps_its_frames() -> None:
    class Wrong(rrfp.Hint):
        def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task | None:
            return rrfp.Task(rrfp.Kind.B, 0, 0)

    with (
        rrfp.local(stages(1), loss_fn=loss_fn, hint=Wrong()).blocking() as pipe,
        pytest.raises(PipelineAborted) as caught,
    ):
        pipe.step(data(2).inputs, data(2).targets)
    lines = printed(caught.value)
    assert len(own_frames(lines)) > 2
    assert not lines[-1].startswith("raised at ")


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({"seed": 0.5}, "rrfp.errors.ConfigError: seed is 0.5"),
        ({"seed": 0.5, "split": 1}, "- split is 1, must be True or False"),
        ({"ties": {"x": 3}}, "rrfp.errors.ConfigError: "),
    ],
    ids=str,
)
def test_a_pipeline_that_is_refused_ends_with_the_callers_frames(options: dict[str, Any], last: str) -> None:
    with pytest.raises(rrfp.ConfigError) as of_local:
        rrfp.local(stages(2), loss_fn=loss_fn, **options)
    with pytest.raises(rrfp.ConfigError) as of_pipeline:
        rrfp.Pipeline(stages(2)[0], topology=Topology(0, 2), rendezvous=LocalRendezvous(), loss_fn=loss_fn, **options)
    for error in (of_local.value, of_pipeline.value):
        lines = printed(error)
        assert lines[-1].startswith(last)
        assert len(own_frames(lines)) == 1
        assert sum(line.startswith("Traceback") for line in lines) == 1


@pytest.mark.parametrize("face", ["with", "async with"])
def test_a_start_that_is_refused_ends_with_the_callers_frames(face: str) -> None:
    class Refusing(rrfp.Hint):
        """A hint that can be made once."""

        made = 0

        def __init__(self) -> None:
            Refusing.made += 1
            if Refusing.made > 1:
                raise rrfp.ConfigError("it wants a file") from KeyError("file")

        def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task | None:
            return next(iter(ready))

    pipeline = rrfp.local(stages(1), loss_fn=loss_fn, hint=Refusing)

    async def enter_async() -> None:
        async with pipeline:
            pass

    def enter() -> None:
        with pipeline:
            pass

    with pytest.raises(rrfp.ConfigError) as caught:
        enter() if face == "with" else asyncio.run(enter_async())
    lines = printed(caught.value)
    assert lines[-1] == "rrfp.errors.ConfigError: it wants a file"
    assert "KeyError: 'file'" in lines
    assert len(own_frames(lines)) <= 3  # entering, and what it calls
    assert not any("concurrent/futures" in line for line in lines)


def test_one_line_at_the_start_tells_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rrfp")
    ThreadedRanks([[each] for each in stages(3)], step, hint="bf", limit="1f1b", seed=0).join()
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert line.startswith("3 rank(s), 1 chunk(s) each, hint bf, limit ")
    assert ", backward whole, transport inproc, rank 0 on cpu; rrfp " in line
    assert f"torch {torch.__version__}, Python 3." in line


def local_step(modules: list[nn.Module], **options: Any) -> None:
    with rrfp.local([*modules], loss_fn=loss_fn, **options).blocking() as pipe:
        pipe.step(data(2).inputs, data(2).targets)


SEEDED: dict[str, tuple[int | None, dict[str, Any], float, bool]] = {
    "seeded by hand": (41, {}, 0.25, True),
    "with seed": (41, {"seed": 0}, 0.25, False),
    "followed": (41, {"seed": None}, 0.25, False),
    "not seeded": (None, {}, 0.25, False),  # as a process begins
    "nothing drawn": (41, {}, 0.0, False),
}


@pytest.mark.parametrize("case", SEEDED)
def test_one_warning_says_that_random_numbers_do_not_follow_a_seed_of_torch(
    case: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a task draws some, in the first training step; once, whatever ranks and pipelines the process has."""
    seed, options, dropout, is_told = SEEDED[case]
    for run_it in (local_step, lambda modules, **options: ThreadedRanks(modules, step, **options).join()):
        monkeypatch.setattr(SeedNotice, "_has_warned", False)
        caplog.clear()
        modules = [module if dropout else nn.Sequential(module[0]) for module in stages(2)]  # type: ignore[index]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7691513816082120994 if seed is None else seed)
            for _ in range(2):
                run_it(modules, **options)
        told = [(record.levelname, record.getMessage()) for record in caplog.records]
        assert told == is_told * [
            (
                "WARNING",
                "dropout and other random numbers of tasks follow seed=, which is 0 by default, and not torch's "
                "generator, which was seeded with 41: pass seed=None to follow it, or seed= to choose",
            )
        ]


def test_python_closes_the_loop_of_an_aborted_async_program() -> None:
    """The traceback that was cut is not needed to free anything."""

    async def program() -> Any:
        async with rrfp.local([Bomb(fail_at(0, Trap("x")))], loss_fn=loss_fn, loop="caller") as pipe:
            await pipe.step(data(1).inputs, data(1).targets)

    with pytest.raises(PipelineAborted):
        asyncio.run(program())


#: By what happens: what the rank at fault prints last, how often "Traceback" begins a line there, and what each other
#: rank says of it in one line, or None where torchrun may end them before.
FAILURES = {
    "raise": ("raised at ", 2, "aborted by stage 1, task F1@1: ValueError: out of luck"),
    "kill": ("", 0, "aborted by stage 1: PeerLostError: its "),
    "refuse": ("rrfp.errors.ConfigError: seed is 0.5", 1, None),
    "start": ("rrfp.errors.ConfigError: its file is missing", 1, None),
    "misspelt": ("rrfp.errors.ConfigError: hint is 'slot-awar'", 1, "ConfigError: hint is 'slot-awar'"),
    "insecure": ("rrfp.errors.ConfigError: zmq would use tcp", 1, "ConfigError: zmq would use tcp"),
    "differ": ("rrfp.errors.ConfigError: seed is 0 on stage 0 and ", 1, "ConfigError: seed is 0 on stage 0 and "),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("kill", "record"),
        *(long(what, "record") for what in ("raise", "refuse", "insecure", "start", "misspelt", "differ")),
        *(long(what, "plain") for what in FAILURES),
    ],
)
def test_under_torchrun_one_rank_prints_a_traceback_and_every_other_one_line(what: str, how: str) -> None:
    for _ in range(3):
        done = run("runtime/torchrun_fails.py", what, how, ranks=3, timeout_s=55, look_every_s=1.0)
        said = done.stderr
        if what != "kill" or said.count(" ends: aborted by ") == 2:
            break  # otherwise torchrun looked at the very moment of the kill, and ended the others before they knew
    assert done.returncode == 1
    last, tracebacks, line = FAILURES[what]
    ours, _, report = said.partition(" Sending process ")
    printed = ours.splitlines()[:-1]  # the last one is the beginning of torchrun's first
    others, root = report.split("Root Cause (first observed failure):")
    [at_fault] = [int(rank) for rank in re.findall(r"rank +: (\d)", root)]
    if what in ("raise", "kill", "refuse", "start"):
        assert at_fault == 1, said

    ends = [text for text in printed if re.match(r"stage \d ends: ", text)]
    assert len(ends) == len(set(ends)) <= 2, said
    assert not any(text.startswith(f"stage {at_fault} ends: ") for text in ends), said
    if line is not None:
        assert len(ends) == 2, said
        assert all(text.partition(" ends: ")[2].startswith(line) for text in ends), said
    # In torchrun's own report too: with error files it has a traceback of each rank that raised.
    entries = others.partition("Failures:\n")[2].splitlines()
    assert len(re.findall(r"traceback : Signal 15 \(SIGTERM\)", others)) == 2, said
    assert len(entries) == 2 * 7 + 1, said  # seven each, of torchrun's own, and a ruler

    rest = [text for text in printed if text not in ends]
    assert sum(text.startswith("Traceback") for text in rest) == tracebacks, said
    if tracebacks:
        assert rest[-1].startswith(last), said
        assert len(own_frames(rest)) <= 2, said
    assert len(rest) <= 24, said
