"""Draws kills and stops at random moments, and runs four real ranks into them."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import runtime.processes as programs
from runtime.processes import PATIENCE_S, Processes
from transports.gloo_backend import over_gloo

from rrfp.model.mesh import Mesh
from rrfp.transports.registry import TransportSpec

#: Replicas that share microbatches.
DEALT, CLAIMED = "pp 2 x dp 2, dealt", "pp 2 x dp 2, claimed"

MESHES = {
    "pp 4": Mesh((("pp", 4),)),
    "pp 2 x tp 2": Mesh((("pp", 2), ("tp", 2))),
    "pp 2 x dp 2": Mesh((("pp", 2), ("dp", 2))),
    DEALT: Mesh((("pp", 2), ("dp", 2))),
    CLAIMED: Mesh((("pp", 2), ("dp", 2))),
}

#: Within this time of a failure every other rank has the error, in seconds: the promise, and a stopped one's patience.
RAISED_S = {signal.SIGKILL: 2.0, signal.SIGSTOP: PATIENCE_S + 2.0}

#: Within this time of the failure every process has ended.
ENDED_S = 15.0


@dataclass(frozen=True)
class Kill:
    """One try.

    Attributes:
        mesh: how the ranks are laid out, a name of `MESHES`.
        victim: its rank.
        how: the signal.
        after: seconds from the first rank's third step.
        seconds: what a task takes.
    """

    mesh: str
    victim: int
    how: signal.Signals
    after: float
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """How it went: seconds until each other rank had the error, and until all processes had ended."""

    kill: Kill
    raised: list[float]
    ended: float


def draw(seed: int, count: int) -> list[Kill]:
    """The same kills for the same seed; a quarter are stops."""
    choices = random.Random(seed)
    return [
        Kill(
            mesh=list(MESHES)[number % len(MESHES)],
            victim=choices.randrange(4),
            how=signal.SIGSTOP if choices.random() < 0.25 else signal.SIGKILL,
            after=choices.uniform(0.0, 0.3),
            seconds=choices.choice([0.0, 0.001, 0.01]),
        )
        for number in range(count)
    ]


def run(kill: Kill, folder: Path, transport: TransportSpec) -> Outcome:
    """Raises AssertionError if a rank hangs, ends without the error, or names somebody else."""
    mesh = MESHES[kill.mesh]
    folder.mkdir()
    options: dict[str, Any] = {"transport": over_gloo if transport == "collective" else transport}
    program = programs.emulated_steps_for_ever
    if kill.mesh in (DEALT, CLAIMED):
        program, options["share_replicas"] = programs.dealt_steps_for_ever, kill.mesh == CLAIMED or "dealt"
    ranks = Processes(folder, 4, program, kill.seconds, mesh=mesh, **options)
    try:
        for rank in range(4):
            said = ranks.hear(rank)
            assert said == "stepping", said
        time.sleep(kill.after)  # the moment is drawn
        struck = time.monotonic()
        os.kill(ranks.pid(kill.victim), kill.how)
        raised = []
        for rank in {*range(4)} - {kill.victim}:
            end = ranks.end(rank)
            assert end.error == "PipelineAborted", end
            assert end.origin is not None
            named = end.origin[0] if end.culprit is None else end.culprit
            assert named == kill.victim, f"rank {rank} names {named}: {end.text}"
            assert end.origin[2].startswith("PeerLostError: "), end.text
            raised.append(end.at - struck)
        assert max(raised) < RAISED_S[kill.how], raised
        if kill.how is signal.SIGSTOP:
            os.kill(ranks.pid(kill.victim), signal.SIGCONT)
            assert ranks.end(kill.victim).error == "PipelineAborted"
        ranks.join(struck, within_s=ENDED_S)
        return Outcome(kill, raised, time.monotonic() - struck)
    finally:
        ranks.kill()


def report(outcomes: list[Outcome]) -> str:
    """Times, by signal."""
    lines = []
    for how in (signal.SIGKILL, signal.SIGSTOP):
        raised = sorted(each for one in outcomes if one.kill.how is how for each in one.raised)
        ended = sorted(one.ended for one in outcomes if one.kill.how is how)
        if ended:
            lines.append(
                f"{len(ended)} x {how.name}: error after {raised[len(raised) // 2]:.2f} s (median), {raised[-1]:.2f} s "
                f"(longest); all ended after {ended[len(ended) // 2]:.2f} s, {ended[-1]:.2f} s"
            )
    return "\n".join(lines)
