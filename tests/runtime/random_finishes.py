"""Draws kills and stops at random moments, and runs replicas into them whose other ranks finish the step, or save."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from runtime.lost_ranks import PATIENCE_S, STAGES, LostRanks, Training, batch_of
from runtime.toys import TOLERANCE, loss_fn, stages
from torch import Tensor, nn

import rrfp
from rrfp import checkpoint
from rrfp.compute.rng import replica_seed
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.testing.reference import reference

#: Ways for replicas to share their work.
SHARED: tuple[Any, ...] = (False, False, "dealt", True)

#: A rank says that it trains after so many steps.
BEGUN = 3

#: Within this time of the kill every other rank has saved, or has the error: the roll call, the step anew, and a save.
ENDED_S = 30.0


@dataclass(frozen=True)
class Kill:
    """One try.

    Attributes:
        replicas: of two stages.
        victim: its rank.
        after: seconds from the moment when all ranks have trained for some steps.
        seconds: what a forward takes.
        shared: how replicas share their work.
        how: the signal.
        pause: seconds until a stopped victim goes on.
    """

    replicas: int
    victim: int
    after: float
    seconds: float
    shared: Any
    how: signal.Signals = signal.SIGKILL
    pause: float = 0.0


@dataclass(frozen=True)
class Saved:
    """What a rank has when it has saved.

    Attributes:
        how: "finished": the step without the lost rank; "kept": what was there before it.
        steps: that its parameters have.
        loss: of the last step, where it was finished.
        losses: likewise, of the rank's own microbatches.
        gradients: likewise.
        parameters: behind it.
        reason: why a step was not finished.
    """

    how: str
    steps: int
    loss: float | None
    losses: tuple[float, ...]
    gradients: list[Any]
    parameters: list[Any]
    reason: str = ""


@dataclass(frozen=True)
class Outcome:
    """How it went: what each other rank did, and seconds from the kill until the last of them had ended."""

    kill: Kill
    how: list[str]
    ended: float


def draw(seed: int, count: int) -> list[Kill]:
    """The same kills for the same seed."""
    choices = random.Random(seed)
    kills = []
    for number in range(count):
        replicas = 2 + number % 2
        kills.append(
            Kill(
                replicas,
                victim=choices.randrange(STAGES * replicas),
                after=choices.uniform(0.0, 0.3),
                seconds=choices.choice([0.0, 0.002, 0.01]),
                shared=SHARED[number // 2 % len(SHARED)],
            )
        )
    return kills


def draw_stops(seed: int, count: int) -> list[Kill]:
    """Likewise; the victim goes on in the roll call of the others, or after it."""
    choices = random.Random(seed)
    return [
        replace(kill, how=signal.SIGSTOP, pause=choices.uniform(PATIENCE_S + 2.0, PATIENCE_S + 10.0))
        for kill in draw(seed + 1, count)
    ]


def named(place: rrfp.Topology, module: nn.Module) -> dict[str, nn.Module]:
    return {f"layers.{place.stage}": module}


def train_until_a_rank_is_lost(training: Training, seconds: float) -> Saved:
    """A user's loop."""
    training.module.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    parts, place = named(training.place, training.module), training.place

    def save(pipe: BlockingPipeline) -> int:
        checkpoint.save(training.folder / "saved", parts, training.optimizer, pipe=pipe, extra=place.rank)
        return int(pipe.state_dict()["step"])

    with training.pipeline as pipe:
        for number in range(10**6):
            try:
                result = training.step(pipe, number)
            except rrfp.RankLostError as lost:
                return Saved("kept", save(pipe), None, (), [], training.parameters(), str(lost))
            gradients = [gradient for gradient in training.gradients() if gradient is not None]
            training.update()
            if result.lost:
                how, steps = "finished", save(pipe)
                return Saved(how, steps, result.loss, result.losses, gradients, training.parameters())
            if number == BEGUN - 1:
                training.connection.send("training")
    raise AssertionError("no rank was lost")


def run(kill: Kill, folder: Path) -> Outcome:
    """Raises AssertionError if a rank hangs, has another result than an undisturbed run, or names somebody else.

    A rank that was stopped, and goes on, names itself.
    """
    folder.mkdir()
    options: dict[str, Any] = {"share_replicas": kill.shared} if kill.shared else {}
    ranks = LostRanks(folder, train_until_a_rank_is_lost, kill.seconds, replicas=kill.replicas, **options)
    left = [rank for rank in range(STAGES * kill.replicas) if rank != kill.victim]
    try:
        for rank in (*left, kill.victim):
            said = ranks.hear(rank)
            assert said == "training", said
        time.sleep(kill.after)  # the moment is drawn
        struck = time.monotonic()
        victim_pid = int(ranks.processes[kill.victim].pid)
        os.kill(victim_pid, kill.how)
        if kill.how is signal.SIGSTOP:
            time.sleep(kill.pause)  # drawn
            os.kill(victim_pid, signal.SIGCONT)
            victim = ranks.end(kill.victim)
            assert victim.error == "PipelineAborted", f"the stopped rank: {victim}"
            assert victim.culprit == kill.victim, f"the stopped rank names {victim.culprit}: {victim.text}"
        ends = {rank: ranks.end(rank) for rank in left}
        last = max(end.at for end in ends.values()) - struck
        ranks.join(struck, within_s=ENDED_S)
    finally:
        ranks.kill()
    saved: dict[int, Saved] = {}
    for rank, end in ends.items():
        if end.error:
            assert end.error == "PipelineAborted", f"rank {rank}: {end.error}: {end.text}"
            assert end.culprit == kill.victim, f"rank {rank} names {end.culprit}: {end.text}"
        else:
            saved[rank] = end.value
            assert str(kill.victim) in saved[rank].reason or saved[rank].how == "finished", saved[rank].reason
    if saved:
        assert len(saved) == len(left), f"of {left} only {sorted(saved)} have saved"
        check(kill, saved)
        check_loads(kill, folder / "saved", saved)
    return Outcome(kill, [saved[rank].how if rank in saved else "aborted" for rank in left], last)


def check(kill: Kill, saved: dict[int, Saved]) -> None:
    """Compare with a run that was left alone."""
    steps = {each.steps for each in saved.values()}
    assert len(steps) == 1, f"ranks have saved after {steps} steps"
    (count,) = steps
    modules = stages(STAGES)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in modules]
    for number in range(count):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss, losses = expected_step(modules, kill.replicas, number)
        for optimizer in optimizers:
            optimizer.step()
    for rank, each in saved.items():
        stage, replica = divmod(rank, kill.replicas)
        parameters = list(modules[stage].parameters())
        if each.how == "finished":
            assert each.loss is not None
            assert abs(each.loss - loss) < TOLERANCE, f"loss of rank {rank}: {each.loss} instead of {loss}"
            assert_close([each.losses], [as_tensor(losses[replica])], f"losses of rank {rank}")
            assert_close(each.gradients, [parameter.grad for parameter in parameters], f"gradients of rank {rank}")
        assert_close(each.parameters, [p.detach() for p in parameters], f"parameters of rank {rank}")


def expected_step(modules: list[nn.Module], replicas: int, number: int) -> tuple[float, list[Any]]:
    """One step in one process, and its loss; and the losses by replica."""
    batches = [batch_of(replica, number) for replica in range(replicas)]
    total = sum(sum(batch.lengths) for batch in batches)
    loss, losses = 0.0, []
    for replica, batch in enumerate(batches):
        found = reference(
            modules, batch.inputs, batch.targets, loss_fn=loss_fn, reduction="sum", grad_scale=1 / total,
            weights=batch.lengths, seed=replica_seed(0, replica), step=number,
        )  # fmt: skip
        assert found.loss is not None
        loss += found.loss / total
        losses.append(found.losses)
    return loss, losses


def assert_close(ours: list[Any], theirs: list[Any], what: str) -> None:
    assert len(ours) == len(theirs), what
    for left, right in zip(map(as_tensor, ours), theirs, strict=True):
        gap = float((left - right).abs().max())
        assert gap < TOLERANCE, f"{what}: {gap}"


def as_tensor(values: Any) -> Tensor:
    """What a process has said."""
    return torch.as_tensor(values, dtype=torch.float64)


def check_loads(kill: Kill, folder: Path, saved: dict[int, Saved]) -> None:
    """Load the checkpoint in one process, of the whole model."""
    modules = stages(STAGES, seed=7)
    parts = {f"layers.{stage}": module for stage, module in enumerate(modules)}
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1, momentum=0.9)
    with torch.random.fork_rng(devices=[]):
        loaded = checkpoint.load(folder, parts, optimizer)
    assert loaded is not None
    assert loaded.step == next(iter(saved.values())).steps
    for stage, module in enumerate(modules):
        rank = next(rank for rank in saved if rank // kill.replicas == stage)
        for left, right in zip(saved[rank].parameters, module.parameters(), strict=True):
            assert torch.equal(as_tensor(left), right)
    assert all(optimizer.state[p]["momentum_buffer"].any() for module in modules for p in module.parameters())


def report(outcomes: list[Outcome]) -> str:
    """How many ended how, and how long it took."""
    ends = Counter(" and ".join(sorted(set(one.how))) for one in outcomes)
    took = sorted(one.ended for one in outcomes)
    counts = ", ".join(f"{how}: {count}" for how, count in sorted(ends.items()))
    times = f"{took[len(took) // 2]:.2f} s (median), {took[-1]:.2f} s (longest)"
    return f"{len(outcomes)} times: {counts}; all others had ended after {times}"
