"""The senders of events that reach a core. Errors name them, since the fault may be theirs."""

from __future__ import annotations

from rrfp.core import events as ev
from rrfp.core.graph import Graph
from rrfp.core.step import Step
from rrfp.errors import ProtocolError, Sender

#: What comes from other ranks.
FromRank = ev.Arrived | ev.Consumed | ev.ReadyReported | ev.Ordered | ev.HeldReported


def sender_of(event: FromRank, graph: Graph) -> Sender:
    """The stage, or the member of this rank's group, that ``event`` comes from."""
    if isinstance(event, ev.Arrived):
        return "stage", graph.placement.stage_of(event.task.virtual_stage)
    if isinstance(event, ev.Consumed):
        return "stage", event.peer
    return "member", 0 if isinstance(event, ev.Ordered) else event.member


def misplaced(event: FromRank, graph: Graph, stage: int, step: Step | None) -> ProtocolError:
    """What is wrong with an event that does not belong to ``step``, the last one that ``stage`` opened."""
    sent, sender = event.step, _described(sender_of(event, graph))
    if step is not None and sent.number == step.id.number and not step.finished:
        where = f"{sender} is in {sent}, stage {stage} in {step.id}"
        return ProtocolError(f"stages disagree on the step: {where}; all ranks must make the same calls in order")
    here = "before its first step"
    if step is not None:
        here = f"in step {step.id.number}" + (" (ended)" if step.finished else "")
    return ProtocolError(f"{event.task} from {sender}, a message of {sent}, reached stage {stage} {here}")


def _described(sender: Sender) -> str:
    kind, index = sender
    if kind == "stage":
        return f"stage {index}"
    return f"member {index} of the group" if index else "the group's leader"
