"""The roll call after a loss, over the rendezvous: who is left, and whether the step can be run again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rrfp import timeouts
from rrfp.errors import Origin, PeerLostError, PipelineAborted, TransportError
from rrfp.model.mesh import MeshPosition
from rrfp.model.topology import Topology
from rrfp.runtime import records
from rrfp.runtime.control_tree import holder_of
from rrfp.transports.base import Rendezvous
from rrfp.transports.rendezvous import by_peer
from rrfp.transports.secret import Secret, vouch, vouched

#: Of the vouchers; see `vouch`.
_PURPOSE = "rrfp roll call 1"


@dataclass(frozen=True, slots=True)
class RollCallAnswer:
    """What a rank that is left knows when it learns of a loss."""

    #: Its own.
    rank: int
    #: Steps of which it has the reports of all ranks, evaluations included: so all ranks have done these.
    steps: int
    #: Whether it has the microbatches, of the step behind these, of the replica that it takes over.
    has_copy: bool
    #: Why this rank cannot run that step again; empty if it can.
    cannot: str = ""
    #: Whose loss it has noticed, or heard of first.
    lost: int = -1


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks that are left do."""

    #: Ascending, as the lost ones are.
    survivors: tuple[int, ...]
    lost: tuple[int, ...]
    #: The number of the first step that a rank has not completed, evaluations included.
    step: int
    #: Why it is not run again; empty if it is.
    why: str = ""
    #: The replicas without a lost rank, which run it.
    whole: tuple[int, ...] = ()

    @classmethod
    def of(cls, answers: Sequence[RollCallAnswer], topology: Topology) -> Decision:
        """What follows from the answers of all ranks that gave one."""
        survivors = tuple(sorted(answer.rank for answer in answers))
        lost = tuple(rank for rank in range(topology.world) if rank not in survivors)
        step = max(answer.steps for answer in answers)
        broken = sorted({topology.place_of(rank).replica for rank in lost})
        whole = tuple(replica for replica in range(topology.replicas) if replica not in broken)
        return cls(survivors, lost, step, _why_not(answers, topology, broken, step), whole)

    def ranks(self, topology: Topology) -> list[int]:
        """Those of the whole replicas, in the order of the smaller pipeline's ranks: by stage and replica."""
        places = (MeshPosition(stage, replica, 0) for stage in range(topology.stages) for replica in self.whole)
        return [topology.mesh.rank(place) for place in places]

    def takes_over(self, replica: int, replicas: int) -> int | None:
        """The replica whose microbatches ``replica`` runs besides its own, if there is one."""
        broken = (each for each in range(replicas) if each not in self.whole)
        return next((each for each in broken if holder_of(each, replicas) == replica), None)


def _why_not(answers: Sequence[RollCallAnswer], topology: Topology, broken: Sequence[int], step: int) -> str:
    if any(answer.steps < step for answer in answers):
        return "Between two steps, of which some ranks had begun the later one"
    for answer in answers:
        if answer.cannot:
            return f"The step cannot be run again, because of {topology.name_of(answer.rank)}: {answer.cannot}"
    by_rank = {answer.rank: answer for answer in answers}
    for replica in broken:
        holder = holder_of(replica, topology.replicas)
        if holder in broken:
            return f"Replicas {replica} and {holder} have lost ranks, and the second had the first one's microbatches"
        ranks = [topology.mesh.rank(MeshPosition(stage, holder, 0)) for stage in range(topology.stages)]
        if not all(by_rank[rank].has_copy for rank in ranks):
            return "The loss came before the others had the lost microbatches of a step: between two steps, or early"
    return ""


@dataclass(frozen=True, slots=True)
class End:
    """How a rank has run a step again."""

    #: Why it could not; empty if it has; and the rank at fault.
    reason: str = ""
    culprit: int = -1


class RollCall:
    """The roll call of one pipeline, on one rank. ``run_id`` is the pipeline's."""

    def __init__(self, topology: Topology, run_id: str, secret: Secret | None, rendezvous: Rendezvous) -> None:
        self._topology = topology
        self._about = (_PURPOSE, run_id, topology.restart)
        self._keys = f"lost/{run_id}/{topology.restart}"
        self._secret = secret
        self._rendezvous = rendezvous

    async def hold(self, own: RollCallAnswer) -> Decision:
        """The decision of all that are left, as the first of them makes it. Names a rank that is lost meanwhile."""
        # A launcher ends the other ranks of the lost one's host when it has looked: who answers later stays.
        await asyncio.sleep(timeouts.LAUNCHER_LOOKS_S)
        await self.publish(f"answer/{own.rank}", own)
        for rank in range(self._topology.world):
            if rank == own.rank:
                others = await self._others(own)
                if any(other.lost == rank for other in others):  # its process was stopped, and goes on
                    raise self.aborted(rank, "was taken for lost by the other ranks")
                decision = await self._decided_without() or Decision.of([own, *others], self._topology)
                await self.publish(f"decision/{rank}", decision)
                return self._followed(decision)
            if rank == own.lost or await self._answer(rank) is None:
                continue
            # It waits for the others no longer than this rank has waited for it.
            told: Decision | None = await self.look(f"decision/{rank}", 2 * timeouts.ROLL_CALL_S, Decision)
            told = told or await self._decided_without()
            if told is None:
                raise self.aborted(rank, "ended or fell silent in the roll call after a loss")
            return self._followed(told)
        raise AssertionError("this rank is one of them")

    async def _decided_without(self) -> Decision | None:
        """What another rank has decided, to which this one seemed lost, as after a stop of its process."""

        async def decided(rank: int) -> Decision | None:
            told: Decision | None = await self.look(f"decision/{rank}", timeouts.GLANCE_S, Decision)
            return told

        others = await by_peer([rank for rank in range(self._topology.world) if rank != self._topology.rank], decided)
        return next((decision for decision in others.values() if decision is not None), None)

    def _followed(self, decision: Decision) -> Decision:
        """``decision``, where this rank is in it; else its own loss."""
        if (own := self._topology.rank) not in decision.survivors:
            raise self.aborted(own, "did not answer in the roll call after a loss in time")
        return decision

    def aborted(self, rank: int, reason: str) -> PipelineAborted:
        """The error of the loss of ``rank``."""
        return self._named(rank, f"{PeerLostError.__name__}: {reason}")

    def _named(self, rank: int, cause: str) -> PipelineAborted:
        return PipelineAborted(Origin(self._topology.place_of(rank).stage, None, cause, rank))

    async def publish_end(self, end: End) -> None:
        """How this rank, of a whole replica, has run the step again."""
        await self.publish(f"end/{self._topology.rank}", end)

    async def ends(self, ranks: Sequence[int]) -> None:
        """Wait until ``ranks`` have run the step again; errors as in `aborted`, or the one that ended them."""

        async def ended(rank: int) -> None:
            end: End | None = await self.look(f"end/{rank}", timeouts.TRANSFER_S, End)
            if end is None:
                raise self.aborted(rank, f"did not run the step again within {timeouts.TRANSFER_S:g} s")
            if end.reason:
                raise self._named(end.culprit, end.reason)

        await by_peer(ranks, ended)

    async def meet(self, where: str, ranks: Sequence[int], timeout_s: float) -> None:
        """Wait until all ``ranks`` are here, once for each ``where``; errors as in `aborted`."""
        await self.publish(f"{where}/{self._topology.rank}", True)

        async def came(rank: int) -> None:
            if await self.look(f"{where}/{rank}", timeout_s, bool) is None:
                raise self.aborted(rank, f"was left, and did not come within {timeout_s:g} s")

        await by_peer(ranks, came)

    async def _others(self, own: RollCallAnswer) -> list[RollCallAnswer]:
        others = [rank for rank in range(self._topology.world) if rank not in (own.rank, own.lost)]
        return [answer for answer in (await by_peer(others, self._answer)).values() if answer is not None]

    async def _answer(self, rank: int) -> RollCallAnswer | None:
        """None if it does not answer in time."""
        answer: RollCallAnswer | None = await self.look(f"answer/{rank}", timeouts.ROLL_CALL_S, RollCallAnswer)
        return answer

    async def publish(self, key: str, value: Any) -> None:
        """Publish ``value``, a record, under ``key``."""
        name = f"{self._keys}/{key}"
        async with asyncio.timeout(timeouts.ROLL_CALL_S):
            await self._rendezvous.publish(name, vouch(self._secret, records.pack(value), *self._about, name))

    async def look(self, key: str, timeout_s: float, kind: type[Any]) -> Any:
        """What was published, of ``kind``; None if nothing was in time."""
        name = f"{self._keys}/{key}"
        began = asyncio.get_running_loop().time()
        try:
            data = await self._rendezvous.lookup(name, timeout_s)
        except TransportError:
            if asyncio.get_running_loop().time() - began >= 0.9 * timeout_s:  # clocks round
                return None
            raise  # the store does not answer: its host may be the lost rank
        what = f"a part of a roll call, {key},"
        value = vouched(self._secret, data, what, self._topology.name, *self._about, name)
        return records.unpack(kind, value, what)
