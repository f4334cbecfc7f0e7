"""What a rank's caller passes for the microbatches of a step, as it travels to the same stage of another replica."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rrfp.compute.loss import SharedGradientWeights
from rrfp.compute.payload import Payload
from rrfp.compute.program import Batch
from rrfp.errors import ProtocolError, StageError
from rrfp.model.graph import TaskGraph
from rrfp.model.topology import Topology
from rrfp.runtime.steps.plan import StepPlan
from rrfp.transports.base import Message

Fields = Mapping[str, Any]


class PassedData:
    """What the caller of the rank at ``topology`` passes, as far as the rank uses it.

    ``option`` is the one with which it travels, for errors.
    """

    def __init__(self, topology: Topology, graph: TaskGraph, option: str) -> None:
        self._stage = topology.stage
        self._option = option
        own = graph.placement.virtual_stages(topology.stage)
        self.used = {
            "inputs": any(not graph.predecessors[v] for v in own),
            "targets": any(not graph.successors[v] for v in own),
            "kwargs": True,
        }

    def lists(self, plan: StepPlan) -> dict[str, Any]:
        """By microbatch; None where the caller passes none."""
        batch = plan.batch_of(self._stage)
        return {name: getattr(batch, name) for name, is_used in self.used.items() if is_used}

    def packed(self, plan: StepPlan, microbatches: Iterable[int]) -> list[Payload]:
        """What was passed for some microbatches, in the caller's own tensors; a StageError if it cannot travel."""
        lists = self.lists(plan)
        weights = plan.weights if plan.weights is None else [*map(float, plan.weights)]  # they may be tensors
        lists |= {"weights": weights, "sizes": plan.sizes, "grad_scales": factors_of(plan.batch).grad_scales}
        packed = []
        for m in microbatches:
            fields = {name: own[m] for name, own in lists.items() if own is not None}
            payload = Payload.pack(fields, f"microbatch {m}")
            if any(tensor is not None and tensor.requires_grad for tensor in payload.tensors):
                raise StageError(
                    f"microbatch {m} has a tensor that requires grad, must have none with {self._option}: its gradient "
                    "would stay with the replica that runs it"
                )
            packed.append(payload)
        return packed


def payload_of(message: Message) -> Payload:
    """What arrived; a ProtocolError if that cannot be read."""
    structure: Any = message.body.get("structure")
    if not isinstance(structure, Sequence):
        raise ProtocolError(f"rank {message.sender} sent a microbatch without the structure of its tensors")
    return Payload(message.tensors, structure)


def copied(payload: Payload) -> Payload:
    """In memory of its own: a module may write into its inputs, and what arrived is read-only."""
    return Payload(tuple([t if t is None else t.clone() for t in payload.tensors]), payload.structure)


def unpacked_fields(payload: Payload) -> Fields:
    """What the caller of another replica passed; a ProtocolError if it is none of that."""
    fields = payload.unpack()
    if not isinstance(fields, Mapping):
        raise ProtocolError("a microbatch arrived that is no dict of inputs, targets and so on")
    for name in ("weights", "sizes"):
        value = fields.get(name)
        if value is not None and not (type(value) is float and value >= 0):
            raise ProtocolError(f"a microbatch arrived with {name} {value!r:.80}, must be a float >= 0")
    if type(scale := fields.get("grad_scales")) is not float:
        raise ProtocolError(f"a microbatch arrived with grad_scales {scale!r:.80}, must be a float")
    return fields


def factors_of(batch: Batch) -> SharedGradientWeights:
    factors = batch.gradient_weights
    assert isinstance(factors, SharedGradientWeights), "the step was planned for one replica"
    return factors
