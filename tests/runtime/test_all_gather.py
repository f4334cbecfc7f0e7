"""The control tree and the all-gather over it, with messages delivered in any order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from rrfp import Topology
from rrfp.compute.gradients.ties import Tie
from rrfp.errors import ProtocolError
from rrfp.model.graph import TaskGraph
from rrfp.model.mesh import Mesh
from rrfp.runtime.all_gather import MOST_AHEAD, TreeAllGather, to_tensor
from rrfp.runtime.control_tree import children, data_peers, parent, peers
from rrfp.transports.base import Channel, Message, MessageKind, Plain


class Network:
    """All-gathers joined by a bag of messages."""

    def __init__(self, stages: int) -> None:
        self.bag: list[tuple[int, Message]] = []
        self.parts = [TreeAllGather(stage, stages, self._poster(stage)) for stage in range(stages)]

    def _poster(self, sender: int) -> Callable[[int, Message], None]:
        return lambda peer, message: self.bag.append((peer, replace(message, sender=sender)))

    async def run(self, choices: random.Random) -> list[Message]:
        """Deliver everything, in drawn order."""
        quiet, carried = 0, []
        while quiet < 3:
            await asyncio.sleep(0)
            quiet = 0 if self.bag else quiet + 1
            if self.bag:
                peer, message = self.bag.pop(choices.randrange(len(self.bag)))
                self.parts[peer].on_message(message)
                carried.append(message)
        return carried


@pytest.mark.parametrize("stages", range(1, 10))
async def test_every_rank_gets_what_all_gave_whatever_comes_first(stages: int) -> None:
    """Several all-gathers at once, joined in a drawn order, some only after messages of theirs have come."""
    for seed in range(20):
        choices, network = random.Random(seed), Network(stages)
        keys = [("step", 0), ("trace", 0), ("trace", 1)]
        joins = [(stage, key) for stage in range(stages) for key in keys]
        choices.shuffle(joins)
        tasks = {}
        for stage, (topic, number) in joins:
            own = f"{topic}{number}@{stage}".encode()
            tasks[stage, topic, number] = asyncio.create_task(network.parts[stage].all_gather(topic, number, own))
            if choices.random() < 0.5:
                await network.run(choices)
        await network.run(choices)
        for (_, topic, number), task in tasks.items():
            assert task.result() == [f"{topic}{number}@{stage}".encode() for stage in range(stages)]


def meshes() -> list[Mesh]:
    """Pipelines alone, and with groups and replicas."""
    sizes = [(pp, dp, tp) for pp in (1, 2, 3, 5) for dp in (1, 2, 3, 4) for tp in (1, 2, 4, 8)]
    names = ("pp", "dp", "tp")
    grids = [Mesh(tuple(zip(names, size, strict=True))) for size in sizes]
    turned = [Mesh((*grid.dims[turn:], *grid.dims[:turn])) for grid in grids for turn in range(3)]
    return [Mesh((("pp", stages),)) for stages in range(1, 34)] + turned


@pytest.mark.parametrize("mesh", meshes(), ids=lambda mesh: " ".join(f"{name}{size}" for name, size in mesh.dims))
def test_the_tree_joins_all_and_a_rank_has_few_peers(mesh: Mesh) -> None:
    graph, ranks = TaskGraph.chain(mesh.stages), range(mesh.size)
    linked = [set(peers(graph, Topology.at(rank, mesh))) for rank in ranks]
    assert parent(0) is None
    for rank in ranks:
        assert all(parent(child) == rank for child in children(rank, mesh.size))
        in_group = mesh.members - 1 if mesh.place_of(rank).member == 0 else 1
        assert len(linked[rank]) <= (5 if mesh.size == mesh.stages else 7) + in_group
        assert all(rank in linked[peer] for peer in linked[rank])
    for dead in ranks:
        reached, todo = set(), [rank for rank in ranks if rank != dead][:1]
        while todo:
            rank = todo.pop()
            if rank not in reached and rank != dead:
                reached.add(rank)
                todo += linked[rank]
        assert len(reached) == mesh.size - 1, f"with {dead} dead the others must reach each other"


def test_tensors_travel_between_neighbours_and_copies_of_a_tied_parameter_only() -> None:
    mesh = Mesh((("pp", 4), ("dp", 2), ("tp", 2)))
    graph, tie = TaskGraph.chain(4), Tie("embedding", (0, 3))
    places = [Topology.at(rank, mesh) for rank in range(mesh.size)]
    for place in places:
        like = {other.stage: other.rank for other in places if _column(other) == _column(place)}
        chain = {like[stage] for stage in (place.stage - 1, place.stage + 1) if stage in like}
        assert set(data_peers(graph, place)) == chain
        assert set(data_peers(graph, place, [tie])) == chain | (
            {like[3 - place.stage]} if place.stage in (0, 3) else set()
        )
        assert set(data_peers(graph, place, [tie])) <= set(peers(graph, place, [tie]))


def _column(place: Topology) -> tuple[int, int]:
    return place.replica, place.member


#: A bundle with the values of ranks 0, 1 and 3; of four, 1 and 3 are rank 1's to report.
BY_0_1_3 = b"\x93\x92\x00\xc4\x00\x92\x01\xc4\x00\x92\x03\xc4\x00"

BAD: list[tuple[dict[str, Plain], bytes, MessageKind, int, str]] = [
    ({"topic": 1, "number": 2}, b"\x90", MessageKind.REPORT, 1, "without topic and number"),
    ({"topic": "step"}, b"\x90", MessageKind.REPORT, 1, "without topic and number"),
    ({"topic": "step", "number": 0}, b"\xc1", MessageKind.REPORT, 1, "cannot be read"),
    ({"topic": "step", "number": 0}, b"", MessageKind.REPORT, 1, "cannot be read"),
    ({"topic": "step", "number": 0}, b"\x91\x92\x00\x01", MessageKind.REPORT, 1, "not bytes by rank"),
    ({"topic": "step", "number": 0}, b"\x90", MessageKind.REPORT, 3, "rank 3 sent rank 0"),
    ({"topic": "step", "number": 0}, b"\x90", MessageKind.REPORT, 1, r"wrong ranks: \[\]"),
    ({"topic": "step", "number": 0}, b"\x91\x92\x01\xc4\x00", MessageKind.REPORT, 1, r"wrong ranks: \[1\]"),
    ({"topic": "step", "number": 0}, BY_0_1_3, MessageKind.REPORT, 1, r"wrong ranks: \[0, 1, 3\]"),
    ({"topic": "step", "number": 0}, b"\x90", MessageKind.RESULT, 1, "rank 1 sent rank 0"),
]


@pytest.mark.parametrize(("body", "data", "kind", "sender", "message"), BAD)
def test_what_makes_no_sense_is_refused(
    body: dict[str, Plain], data: bytes, kind: MessageKind, sender: int, message: str
) -> None:
    part = TreeAllGather(0, 4, lambda peer, sent: None)
    with pytest.raises(ProtocolError, match=message):
        part.on_message(Message(Channel.CONTROL, kind, tensors=(to_tensor(data),), body=body, sender=sender))


def test_a_report_that_is_no_bytes_is_refused() -> None:
    tensors = (torch.ones(2, requires_grad=True),)
    body: dict[str, Plain] = {"topic": "step", "number": 0}
    with pytest.raises(ProtocolError, match="rank 1 sent a report that cannot be read"):
        TreeAllGather(0, 4, lambda peer, sent: None).on_message(
            Message(Channel.CONTROL, MessageKind.REPORT, tensors=tensors, body=body, sender=1)
        )


def report(number: int, topic: str = "step") -> Message:
    """What rank 1 gives to rank 0."""
    body: dict[str, Plain] = {"topic": topic, "number": number}
    given = to_tensor(b"\x91\x92\x01\xc4\x01x")
    return Message(Channel.CONTROL, MessageKind.REPORT, tensors=(given,), body=body, sender=1)


def test_what_a_peer_begins_alone_is_bounded() -> None:
    part = TreeAllGather(0, 2, lambda peer, sent: None)
    for number in range(MOST_AHEAD):
        part.on_message(report(number))
    with pytest.raises(ProtocolError, match=f"rank 1 began step 16, but {MOST_AHEAD} all-gathers are open already"):
        part.on_message(report(MOST_AHEAD))


def test_a_result_that_lacks_a_stage_is_refused() -> None:
    part = TreeAllGather(1, 2, lambda peer, sent: None)
    body: dict[str, Plain] = {"topic": "step", "number": 0}
    tensors = (to_tensor(b"\x90"),)
    with pytest.raises(ProtocolError, match="a result of step 0"):
        part.on_message(Message(Channel.CONTROL, MessageKind.RESULT, tensors=tensors, body=body, sender=0))


@pytest.mark.parametrize("stages", range(1, 8))
async def test_a_reduction_gives_all_ranks_the_answer_of_rank_0_alone(stages: int) -> None:
    for seed in range(5):
        network = Network(stages)
        asked: list[Sequence[bytes]] = []

        def answer(contributions: Sequence[bytes], asked: list[Sequence[bytes]] = asked) -> bytes:
            asked.append(contributions)
            return b"sum %d" % sum(map(int, contributions))

        tasks = [
            asyncio.create_task(part.reduce("sum", 7, str(rank).encode(), answer))
            for rank, part in enumerate(network.parts)
        ]
        carried = await network.run(random.Random(seed))
        assert {task.result() for task in tasks} == {b"sum %d" % sum(range(stages))}
        assert asked == [[str(rank).encode() for rank in range(stages)]]
        down = [message for message in carried if message.kind is MessageKind.RESULT]
        assert all(message.num_bytes < 20 for message in down), "the contributions do not travel down"


async def test_a_reduction_takes_no_result_of_an_all_gather() -> None:
    part = TreeAllGather(1, 2, lambda peer, sent: None)
    task = asyncio.create_task(part.reduce("sum", 0, b"1", lambda contributions: b""))
    await asyncio.sleep(0)
    body: dict[str, Plain] = {"topic": "sum", "number": 0}
    tensors = (to_tensor(b"\x92\x92\x00\xc4\x01x\x92\x01\xc4\x01x"),)
    with pytest.raises(ProtocolError, match="a result of sum 0"):
        part.on_message(Message(Channel.CONTROL, MessageKind.RESULT, tensors=tensors, body=body, sender=0))
    task.cancel()


@pytest.mark.parametrize("data", [b"", b"x", bytes(1000)], ids=len)
def test_bytes_travel_as_a_tensor_of_their_length(data: bytes) -> None:
    assert bytes(to_tensor(data).tolist()) == data
