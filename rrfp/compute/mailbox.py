"""The payloads that a rank keeps between tasks: outputs of its own tasks, and outputs that arrived.

The loop writes arrivals and the lane's thread writes outputs; both read. Single dict operations need no lock. The core
decides when an output is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from rrfp.compute.payload import ABSENT, Payload
from rrfp.compute.program import StageProgram
from rrfp.compute.read_only import Returned
from rrfp.errors import ProtocolError, StageError
from rrfp.model.graph import TaskGraph
from rrfp.model.model_graph import Feeds
from rrfp.model.tasks import KINDS, LOCAL_KINDS, B, F, Mode, Task
from rrfp.model.visits import Visits
from rrfp.plain import shown


class Mailbox:
    """Payloads by the task that produced them."""

    # A forward has one payload, of which a reader gets what `Feeds` says. A backward has one for each predecessor. What
    # a microbatch skips is `ABSENT` to its readers.

    def __init__(self, graph: TaskGraph, stage: int, feeds: Feeds | None = None) -> None:
        self.returned = Returned()
        self._graph = graph
        self._stage = stage
        self._feeds = Feeds() if feeds is None else feeds
        self._visits = Visits(1)
        self._forward: dict[Task, Payload] = {}
        self._backward: dict[Task, dict[int, Payload]] = {}

    def open(self, visits: Visits, mode: Mode) -> None:
        """Begin a step, whose first outputs may be here already."""
        self._visits = visits
        self.returned.open(mode)

    def put_forward(self, task: Task, output: Payload) -> None:
        self._forward[task] = output

    def put_backward(self, task: Task, grads: Sequence[Payload]) -> None:
        """Keep the input gradients of a B, one for each predecessor."""
        predecessors = self._graph.predecessors[task.virtual_stage]
        if len(grads) != len(predecessors):
            raise StageError(f"{len(grads)} input gradients, must be one for each predecessor: {len(predecessors)}")
        self._backward[task] = dict(zip(predecessors, grads, strict=True))

    def inputs(self, task: Task) -> tuple[Payload, ...]:
        """A payload for each predecessor (F) or successor (B)."""
        kind, m, v = task
        skipped = self._visits.skipped_by(m)
        if kind is F:
            before = self._graph.predecessors[v]
            return tuple([ABSENT if u in skipped else self._read(Task(F, m, u), (v,)) for u in before])
        after = self._graph.successors[v]
        return tuple([ABSENT if w in skipped else self._backward[Task(B, m, w)][v] for w in after])

    def _read(self, producer: Task, readers: Collection[int]) -> Payload:
        """What ``readers`` read together of the output of a forward."""
        payload, keys = self._forward[producer], self._feeds.keys(producer.virtual_stage, readers)
        return payload if keys is None else payload.pick(keys)[0]

    def received(self, task: Task) -> Iterator[Tensor]:
        """The input tensors of F or B from other stages; none for others."""
        if task.kind in LOCAL_KINDS:
            return
        edges = self._graph.predecessors if task.kind is F else self._graph.successors
        for v, payload in zip(edges[task.virtual_stage], self.inputs(task), strict=True):
            if self._graph.stage_of[v] != self._stage:
                yield from (tensor for tensor in payload.tensors if tensor is not None)

    def drop(self, task: Task) -> None:
        """Forget the output of ``task``, which has been sent and read."""
        self.returned.drop(task)
        self._forward.pop(task, None)
        self._backward.pop(task, None)

    def clear(self) -> None:
        self._forward.clear()
        self._backward.clear()

    def pack(self, task: Task, peer: int) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
        """The tensors of ``task``'s output for the stage ``peer``, and their description."""
        stage_of = self._graph.stage_of
        skipped = self._visits.skipped_by(task.microbatch)
        if task.kind is F:
            after = self._graph.successors[task.virtual_stage]
            payload = self._read(task, [w for w in after if stage_of[w] == peer and w not in skipped])
            return payload.tensors, {"structure": payload.structure}
        tensors, parts = list[Tensor | None](), list[tuple[int, int]]()
        for u, payload in self._backward[task].items():
            if stage_of[u] == peer:
                own = () if u in skipped else payload.tensors
                tensors += own
                parts.append((u, len(own)))
        return tuple(tensors), {"parts": parts}

    def unpack(self, task: Task, tensors: Sequence[Tensor | None], body: Mapping[str, Any]) -> None:
        """Keep another rank's output; a ProtocolError if its description is wrong."""
        if task.kind is F:
            if not isinstance(structure := body.get("structure"), Sequence):
                raise ProtocolError(f"{task} arrived without the structure of its tensors")
            self._forward[task] = Payload(tuple(tensors), structure)
            return
        if task.virtual_stage >= len(self._graph.predecessors):
            last = len(self._graph.predecessors) - 1
            raise ProtocolError(f"{task} arrived, but the last virtual stage is {last}")
        payloads, rest = {}, list(tensors)
        try:
            for virtual_stage, count in body["parts"]:
                if virtual_stage in payloads:
                    raise ValueError(f"virtual stage {virtual_stage} comes twice")
                if type(count) is not int or not 0 <= count <= len(rest):
                    text = f"{shown(count)}, must be a whole number 0..{len(rest)}"
                    raise ValueError(f"tensors for virtual stage {shown(virtual_stage)}: {text}")
                payloads[virtual_stage], rest = Payload(tuple(rest[:count])), rest[count:]
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"{task} arrived with a malformed description: {error!r}") from None
        stage_of = self._graph.stage_of
        readers = {u for u in self._graph.predecessors[task.virtual_stage] if stage_of[u] == self._stage}
        if rest or payloads.keys() != readers:
            raise ProtocolError(f"{task} arrived with gradients for {list(payloads)}, expected {sorted(readers)}")
        self._backward[task] = payloads


def run_task(program: StageProgram, mailbox: Mailbox, task: Task) -> tuple[int, int]:
    """Run ``task`` on the lane's thread; returns the bytes that it holds, and those of its output beside them."""
    kind, m, v = task
    returned, num_bytes = mailbox.returned, 0
    returned.begin(task)
    if kind is F:
        output: Any = program.forward(task, mailbox.inputs(task))
        if not isinstance(output, Payload):
            raise StageError(f"{_method(program, 'forward')} returned a {type(output).__name__}, must return a Payload")
        returned.end(task, (output,), program.name_of)
        mailbox.put_forward(task, output)
        num_bytes = output.num_bytes
        num_bytes -= min(num_bytes, program.held_output_bytes(m, v))
    elif kind is B:
        grads: Any = program.backward(task, mailbox.inputs(task))
        if not isinstance(grads, tuple) or not all(isinstance(payload, Payload) for payload in grads):
            raise StageError(f"{_method(program, 'backward')} must return a tuple of Payloads")
        returned.end(task, grads, program.name_of)
        mailbox.put_backward(task, grads)
        for payload in grads:
            num_bytes += payload.num_bytes
    else:
        getattr(program, KINDS[kind].name)(task)
        returned.end(task, (), program.name_of)
    return program.held_bytes(m, v), num_bytes


def _method(program: StageProgram, name: str) -> str:
    return f"{type(program).__name__}.{name}"
