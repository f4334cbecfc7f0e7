"""Where a rank keeps tensors between tasks: outputs of its own tasks, and outputs that arrived.

Written by the loop (arrivals) and by the lane's thread (outputs), read by both; single dict operations need no lock.
What may be dropped, and when, is the core's to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rrfp.compute.payload import Payload
from rrfp.compute.program import StageProgram
from rrfp.core.graph import Graph
from rrfp.core.tasks import Kind, Task
from rrfp.errors import ProtocolError, StageError


class Mailbox:
    """Payloads by the task that produced them.

    A forward's payload is the same for every reader. A backward has one payload for each predecessor.

    Args:
        graph: who reads what.
        stage: this rank's stage.
    """

    def __init__(self, graph: Graph, stage: int) -> None:
        self._graph = graph
        self._stage = stage
        self._forward: dict[Task, Payload] = {}
        self._backward: dict[Task, dict[int, Payload]] = {}

    def put_forward(self, task: Task, output: Payload) -> None:
        """Keep the output of an F."""
        self._forward[task] = output

    def put_backward(self, task: Task, grads: Sequence[Payload]) -> None:
        """Keep the input gradients of a B, one payload for each predecessor in graph order.

        Raises:
            StageError: if there are more, or fewer.
        """
        predecessors = self._graph.predecessors[task.virtual_stage]
        if len(grads) != len(predecessors):
            raise StageError(f"{len(grads)} input gradients, must be one for each predecessor: {len(predecessors)}")
        self._backward[task] = dict(zip(predecessors, grads, strict=True))

    def inputs(self, task: Task) -> tuple[Payload, ...]:
        """What F or B reads: a payload for each predecessor (F) or successor (B), in graph order."""
        kind, m, v = task
        if kind is Kind.F:
            return tuple(self._forward[Task(Kind.F, m, u)] for u in self._graph.predecessors[v])
        return tuple(self._backward[Task(Kind.B, m, w)][v] for w in self._graph.successors[v])

    def output_bytes(self, task: Task) -> int:
        """Bytes of all that ``task`` put out, dense."""
        if task.kind is Kind.F:
            return self._forward[task].num_bytes
        return sum(payload.num_bytes for payload in self._backward.get(task, {}).values())

    def drop(self, task: Task) -> None:
        """Forget the output of ``task``."""
        self._forward.pop(task, None)
        self._backward.pop(task, None)

    def clear(self) -> None:
        """Forget everything."""
        self._forward.clear()
        self._backward.clear()

    def pack(self, task: Task, peer: int) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
        """The tensors and the description of ``task``'s output that stage ``peer`` needs."""
        if task.kind is Kind.F:
            payload = self._forward[task]
            return payload.tensors, {"structure": payload.structure}
        place = self._graph.placement
        parts = {u: p for u, p in self._backward[task].items() if place.stage_of(u) == peer}
        tensors = tuple(tensor for payload in parts.values() for tensor in payload.tensors)
        return tensors, {"parts": [[u, len(payload.tensors)] for u, payload in parts.items()]}

    def unpack(self, task: Task, tensors: Sequence[Tensor | None], body: Mapping[str, Any]) -> None:
        """File what `pack` made on another rank.

        Raises:
            ProtocolError: if the description does not fit.
        """
        if task.kind is Kind.F:
            if not isinstance(structure := body.get("structure"), Sequence):
                raise ProtocolError(f"{task} arrived without the structure of its tensors")
            self._forward[task] = Payload(tuple(tensors), structure)
            return
        parts, rest = {}, list(tensors)
        try:
            for virtual_stage, count in body["parts"]:
                parts[virtual_stage], rest = Payload(tuple(rest[:count])), rest[count:]
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"{task} arrived with a description that cannot be read: {error!r}") from None
        place = self._graph.placement
        readers = {u for u in self._graph.predecessors[task.virtual_stage] if place.stage_of(u) == self._stage}
        if rest or set(parts) != readers:
            raise ProtocolError(f"{task} arrived with gradients for {sorted(parts)}, expected {sorted(readers)}")
        self._backward[task] = parts


def run_task(program: StageProgram, mailbox: Mailbox, task: Task) -> None:
    """Run ``task`` with what ``mailbox`` holds, and keep what it puts out. Called on the lane's thread.

    Raises:
        StageError: if the program returns something else than its contract says.
    """
    if task.kind is Kind.F:
        output: Any = program.forward(task, mailbox.inputs(task))
        if not isinstance(output, Payload):
            raise StageError(f"{_method(program, 'forward')} returned a {type(output).__name__}, must return a Payload")
        mailbox.put_forward(task, output)
    elif task.kind is Kind.B:
        grads: Any = program.backward(task, mailbox.inputs(task))
        if not isinstance(grads, tuple) or not all(isinstance(payload, Payload) for payload in grads):
            raise StageError(f"{_method(program, 'backward')} must return a tuple of Payloads")
        mailbox.put_backward(task, grads)
    else:
        program.weight(task)


def bytes_after(program: StageProgram, mailbox: Mailbox, task: Task) -> tuple[int, int]:
    """What ``task``, which has just run, leaves in memory. Called on the lane's thread.

    Returns:
        Bytes that its microbatch holds on its virtual stage, and those of its output that these do not count.
    """
    _, m, v = task
    output = mailbox.output_bytes(task)
    if task.kind is Kind.F:
        output -= min(output, program.held_output_bytes(m, v))
    return program.held_bytes(m, v), output


def _method(program: StageProgram, name: str) -> str:
    return f"{type(program).__name__}.{name}"
