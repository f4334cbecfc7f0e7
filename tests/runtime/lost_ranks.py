"""Replicas in real processes, one rank of which is killed at a chosen point, with ``on_lost_rank="finish"``."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from runtime.children import Children, End
from runtime.toys import data, loss_fn, stages
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]

import rrfp
from rrfp import StepResult
from rrfp.compute.rng import replica_seed
from rrfp.model.mesh import Mesh, MeshPosition
from rrfp.model.topology import Topology
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.pipeline.lost_rank.roll_call import RollCall
from rrfp.pipeline.lost_rank.step_snapshot import StepSnapshot
from rrfp.pipeline.lost_rank.survivors import Survivors
from rrfp.runtime.control_tree import holder_of
from rrfp.testing.reference import reference
from rrfp.transports.rendezvous import StoreRendezvous

STAGES = 2

#: The step in which the victim dies.
LAST = 2

#: For how long a peer may be silent.
PATIENCE_S = 3.0


class Training:
    """What a rank trains: a model of two stages, with batches of another size for each replica and step."""

    def __init__(self, place: Topology, folder: Path, connection: Connection, **options: Any) -> None:
        self.place, self.folder, self.connection = place, folder, connection
        self.with_weights = options.pop("tokens", True)
        if options.pop("hosted", False):
            where: dict[str, Any] = {}
        else:
            where = {"rendezvous": StoreRendezvous(FileStore(str(folder / "store"), place.world), run_id="test")}
        self.module = model(tied=bool(options.get("tied")))[place.stage]
        if options.pop("tied", False):
            options["ties"] = {"weight": self.module[0].weight}
        self.named = {f"layers.{place.stage}": self.module}
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        settings = {"loss_fn": loss_fn, "patience": PATIENCE_S, "lock_watch": False, "connect_timeout": 15.0}
        self.pipeline = rrfp.Pipeline(
            self.module,
            topology=place,
            **where,
            **{**settings, "on_lost_rank": "finish", **options},
        )

    def step(self, pipe: BlockingPipeline, number: int) -> StepResult:
        batch = batch_of(self.place.replica, number)
        return pipe.step(
            batch.inputs if self.place.stage == 0 else None,
            batch.targets if self.place.stage == STAGES - 1 else None,
            weights=batch.lengths if self.with_weights else None,
            microbatches=len(batch.inputs),
        )

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> list[Any]:
        return [parameter.tolist() for parameter in self.module.parameters()]

    def gradients(self) -> list[Any]:
        return [p.grad if p.grad is None else p.grad.tolist() for p in self.module.parameters()]


def batch_of(replica: int, step: int) -> Any:
    return data(4 + replica, seed=10 * step + replica)


def model(*, tied: bool) -> list[nn.Sequential]:
    """By stage; the weights of both may be equal."""
    modules: Any = stages(STAGES)
    if tied:
        modules[1][0].weight.data.copy_(modules[0][0].weight.data)
    return [*modules]


def expected(replicas: int, steps: int, *, tokens: bool = True, tied: bool = False) -> list[Any]:
    """Of each step: the loss, the gradients by stage, and the losses by replica; and the parameters behind it."""
    modules = model(tied=tied)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in modules]
    history = []
    for number in range(steps):
        batches = [batch_of(replica, number) for replica in range(replicas)]
        total = sum(sum(batch.lengths) if tokens else len(batch.inputs) for batch in batches)
        loss, losses = 0.0, []
        for replica, batch in enumerate(batches):
            found = reference(
                modules, batch.inputs, batch.targets, loss_fn=loss_fn, reduction="sum", grad_scale=1 / total,
                weights=batch.lengths if tokens else None, seed=replica_seed(0, replica), step=number,
            )  # fmt: skip
            assert found.loss is not None
            loss += found.loss / total
            losses.append(found.losses)
        if tied:
            copies: list[Any] = [module[0].weight for module in modules]
            total_of_copies = copies[0].grad + copies[1].grad
            for copy in copies:
                copy.grad = total_of_copies.clone()
        gradients = [[p.grad.clone() for p in module.parameters() if p.grad is not None] for module in modules]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        history.append((loss, gradients, losses, [[p.detach().clone() for p in m.parameters()] for m in modules]))
    return history


def die_in(training: Training, pipe: BlockingPipeline, step: int, victim: int) -> None:
    """Let ``victim`` stop in its last backward of ``step``, when its copies have left; the test kills it."""
    seen = {"backwards": 0}

    def stop(*_: Any) -> None:
        seen["backwards"] += 1
        runner = pipe._session._runners[0]
        if seen["backwards"] == len(batch_of(training.place.replica, step).inputs):
            assert runner._copies is not None
            assert runner._copies._sent.is_set(), "the copies have not left"
            training.connection.send("here")
            signal.pause()

    def watch(module: Any, inputs: Any, output: Tensor) -> None:
        output.register_hook(stop)  # type: ignore[no-untyped-call]

    if training.place.rank == victim:
        training.module.register_forward_hook(watch)


def say_when_copied(training: Training, pipe: BlockingPipeline, step: int, victim: int) -> None:
    """Let the rank that keeps the copies of ``victim`` say when it has all of a step."""
    runner = pipe._session._runners[0]
    number = runner.steps_ended

    def look() -> None:
        while runner.copied(number) is None:
            time.sleep(0.002)
        training.connection.send("copied")

    if runner._copies is not None and runner._copies._held_rank == victim:
        threading.Thread(target=look, daemon=True).start()


def both_die(training: Training, victims: tuple[int, int]) -> Any:
    """As `finishes`, with two victims."""
    own = training.place.rank
    return finishes(training, victims[0] if own in victims else {0: 1, 2: 3}[own])


def finishes(training: Training, victim: int) -> Any:
    """Train; in the last step the victim dies in its last backward. The others update, save and leave."""
    with training.pipeline as pipe:
        for number in range(LAST):
            assert training.step(pipe, number).lost == ()
            training.update()
        die_in(training, pipe, LAST, victim)
        say_when_copied(training, pipe, LAST, victim)
        result = training.step(pipe, LAST)
        gradients = training.gradients()
        training.update()
        path = rrfp.checkpoint.save(training.folder / "saved", training.named, training.optimizer, pipe=pipe)
        state = pipe.state_dict()
    parameters, step = training.parameters(), state["step"]
    return result.loss, result.losses, result.lost, gradients, parameters, str(path), step, str(result)


def saves_a_trace(training: Training, victim: int) -> Any:
    """Train; the victim dies before the others save a trace, twice, and a checkpoint."""
    path, told = training.folder / "trace.json", []
    with training.pipeline as pipe:
        for number in range(LAST):
            training.step(pipe, number)
            training.update()
        if training.place.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(2):
            try:
                pipe.save_trace(path)
            except rrfp.RrfpError as error:
                told.append((type(error).__name__, str(error)))
        rrfp.checkpoint.save(training.folder / "saved", training.named, training.optimizer, pipe=pipe)
        step = pipe.state_dict()["step"]
    return told, step, path.exists()


def awaits(training: Training) -> str:
    """Enter the pipeline in a coroutine."""

    async def enter() -> None:
        async with training.pipeline:
            raise AssertionError("it was entered")

    try:
        asyncio.run(enter())
    except rrfp.ConfigError as error:
        return str(error)
    return ""


def resumes(training: Training) -> Any:
    """Load the newest checkpoint, and train one step."""
    with training.pipeline as pipe:
        rrfp.checkpoint.load(training.folder / "saved", training.named, training.optimizer, pipe=pipe)
        number = pipe.state_dict()["step"]
        training.step(pipe, number)
        training.update()
        return number, training.parameters()


def trains_until_lost(training: Training, victim: int, when: str) -> Any:
    """Train; the victim dies before it calls step `LAST`, or when it has returned. The others save."""
    told = ""
    with training.pipeline as pipe:
        for number in range(100):
            if training.place.rank == victim and number == LAST and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                result = training.step(pipe, number)
            except rrfp.RankLostError as error:
                told = str(error)
                break
            if training.place.rank == victim and number == LAST and when == "behind":
                os.kill(os.getpid(), signal.SIGKILL)
            training.update()
            if result.lost:
                told = "lost"
                break
        step = pipe.state_dict()["step"]
        try:
            training.step(pipe, number + 1)
        except rrfp.RrfpError as error:
            refused = str(error)
        rrfp.checkpoint.save(training.folder / "saved", training.named, training.optimizer, pipe=pipe)
    return told, step, training.parameters(), refused


def clips_and_scales(training: Training, victim: int) -> Any:
    """As `finishes`, with a GradScaler and clipped gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with training.pipeline as pipe:
        pipe.scale(scaler)
        for number in range(LAST + 1):
            if number == LAST:
                die_in(training, pipe, LAST, victim)
                say_when_copied(training, pipe, LAST, victim)
            result = training.step(pipe, number)
            scaler.unscale_(training.optimizer)
            norm = pipe.clip_grad_norm_(0.01)
            gradients = training.gradients()
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()
    return result.lost, norm, gradients


def dies_in_the_roll_call(training: Training, victim: int, seconds: Sequence[int], when: str) -> Any:
    """As `finishes`; further ranks die meanwhile, ``when`` they do something."""

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_in_a_task(*_: Any) -> None:
        training.module.register_forward_hook(die)

    def die_in_a_group(*_: Any) -> None:
        dist.new_group = die

    owner, method, action = {
        "deciding": (RollCall, "_others", die),
        "beginning": (StepSnapshot, "restore", die),
        "running": (StepSnapshot, "restore", die_in_a_task),
        "grouping": (StepSnapshot, "restore", die_in_a_group),
        "done": (RollCall, "publish_end", die),
        "meeting": (Survivors, "pass_gradients", die),
        "gathering": (Survivors, "gather", die),
    }[when]
    if training.place.rank in seconds:
        setattr(owner, method, action)
    return finishes(training, victim)


class LostRanks(Children):
    """Runs ``program`` on all ranks of a mesh, two stages by ``replicas``; it gets the `Training` and ``arguments``."""

    def __init__(self, folder: Path, program: Any, *arguments: Any, replicas: int = 2, **options: Any) -> None:
        super().__init__()
        mesh = Mesh((("pp", STAGES), ("dp", replicas)))
        self.mesh = mesh
        init = f"file://{folder}/gloo"
        if options.get("hosted"):  # by rank 0
            with socket.create_server(("127.0.0.1", 0)) as free:
                init = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        for rank in range(mesh.size):
            self.start(f"rank-{rank}", _run, folder, init, mesh, rank, program, arguments, options)

    def strike(self, rank: int) -> None:
        os.kill(int(self.processes[rank].pid), signal.SIGKILL)

    def holder(self, rank: int) -> int:
        """The rank that keeps the copies of ``rank``."""
        stage, replica, _ = self.mesh.place_of(rank)
        return self.mesh.rank(MeshPosition(stage, holder_of(replica, self.mesh.replicas), 0))

    def ends(self, ranks: Iterable[int]) -> dict[int, End]:
        return {rank: self.end(rank) for rank in ranks}

    def values(self, ranks: Iterable[int]) -> dict[int, Any]:
        """What the programs of ``ranks`` return."""
        ends = self.ends(ranks)
        for rank, end in ends.items():
            assert not end.error, f"rank {rank}: {end.error}: {end.text}"
        return {rank: end.value for rank, end in ends.items()}


def _run(
    folder: Path, init: str, mesh: Mesh, rank: int, program: Any, arguments: Any, options: Any, connection: Connection
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=mesh.size)

    def run() -> Any:
        return program(Training(rrfp.Topology.at(rank, mesh), folder, connection, **options), *arguments)

    try:
        end = End.of(run)
    except BaseException as error:
        end = End(type(error).__name__, str(error), None, time.monotonic())
    connection.send(end)
    connection.close()
    os._exit(0)  # groups with a lost rank would wait for it
