"""One rank of the coordination benchmark, started by torchrun: all methods in one process, alternating by step.

Every task begins with a real collective over the group, as tensor-parallel layers have: no rank goes on before all have
come. Then it sleeps the table's time, as an accelerator would leave the CPU idle. Rank 0 prints one line of JSON for
each step.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.tp.settings import METHODS, Settings
from rrfp.lab.emulated import EmulatedStage
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Task
from rrfp.model.topology import Topology
from rrfp.pipeline.api import Pipeline
from rrfp.trace.plain import to_plain
from rrfp.transports.base import Channel, Message, MessageKind, TransportContext
from rrfp.transports.zmq.transport import ZmqTransport

_GROUP_KINDS = frozenset(
    {MessageKind.READY, MessageKind.ORDER, MessageKind.PROPOSE, MessageKind.OUTCOME, MessageKind.PROMPT}
)


class GroupedStage(EmulatedStage):
    """Tasks that begin with a collective over the group."""

    def __init__(self, graph: TaskGraph, settings: Settings, group: dist.ProcessGroup | None) -> None:
        super().__init__(graph, self._seconds, num_bytes=1024)
        self._settings = settings
        self._group = group
        self.round = 0

    def _seconds(self, task: Task) -> float:
        tensor = torch.zeros(1)
        if self._group is not None:
            dist.all_reduce(tensor, group=self._group)
        return self._settings.costs(self.round).duration(task.kind.value, task.virtual_stage, task.microbatch)


class DelayedZmq(ZmqTransport):
    """Sends tensors late, each rank by times of its own, and counts what the ranks of a group say to each other."""

    def __init__(self, context: TransportContext, *, settings: Settings, stage: GroupedStage) -> None:
        super().__init__(context)
        self._settings = settings
        self._stage = stage
        self.group_messages = 0

    async def send(self, peer: int, message: Message) -> None:
        """See `Transport.send`."""
        if message.channel is not Channel.CONTROL:
            await asyncio.sleep(self._settings.delay_s(self._stage.round, self.context.rank, str(message.task)))
        self.group_messages += message.kind in _GROUP_KINDS
        await super().send(peer, message)

    def send_at_once(self, peer: int, message: Message) -> bool:
        """See `SendsAtOnce.send_at_once`; tensors have to wait."""
        if message.channel is not Channel.CONTROL or not super().send_at_once(peer, message):
            return False
        self.group_messages += message.kind in _GROUP_KINDS
        return True


def group_of(place: Topology) -> dist.ProcessGroup | None:
    """The process group of this rank's group; every rank makes all of them, in one order."""
    own = None
    for stage in range(place.stages):
        ranks = Topology(stage, place.stages, mesh=place.mesh).group
        made = dist.new_group(list(ranks))
        own = made if stage == place.stage else own
    return own


def run(settings: Settings, stack: ExitStack) -> None:
    """Run all methods to the end."""
    place = Topology.from_env(dims={"pp": settings.stages, "tp": settings.tp})
    program = GroupedStage(TaskGraph.chain(settings.stages), settings, group_of(place))
    transports: dict[str, DelayedZmq] = {}
    pipes = {}
    for name, (coordination, depth) in METHODS.items():

        def make(context: TransportContext, name: str = name) -> DelayedZmq:
            transports[name] = DelayedZmq(context, settings=settings, stage=program)
            return transports[name]

        pipeline = Pipeline(
            program,
            topology=place,
            transport=make,
            hint="bf",
            limit=settings.limit(),
            coordination=coordination,
            depth=depth,
        )
        pipes[name] = stack.enter_context(pipeline.blocking())
    for number in range(settings.rounds + 1):
        turn = number % len(METHODS)
        program.round = number
        for name in (*list(METHODS)[turn:], *list(METHODS)[:turn]):
            dist.barrier()
            before = transports[name].group_messages
            result = pipes[name].step(microbatches=settings.microbatches)
            sent = transports[name].group_messages - before
            report(name, number, {"trace": to_plain(result.trace), "messages": sent})


def report(name: str, number: int, own: dict[str, Any]) -> None:
    """Tell the command how a step went."""
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, parts)
    if parts is not None:
        line = {"method": name, "round": number, "traces": [part["trace"] for part in parts]}
        sys.stdout.write(json.dumps({**line, "messages": sum(part["messages"] for part in parts)}) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Entry point under torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with ExitStack() as stack:
        run(Settings.from_json(sys.argv[1]), stack)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
