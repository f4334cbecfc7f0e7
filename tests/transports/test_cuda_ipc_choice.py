"""Where there are slots of device memory: the choice for each peer, the trial, and the line that says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transports.makers as makers
from compute.separate_double import SeparateDouble, check_races, closing
from torch import Tensor
from transports.slot_ends import Ends, ends, kinds, refusing
from transports.staged_ends import is_on, on

from rrfp import timeouts
from rrfp.compute.lanes.stream import StreamLane
from rrfp.devices.copies import copies_of
from rrfp.testing.transport_checks.pair import (
    assert_same,
    data,
    receive,
    soon,
)
from rrfp.transports.auto import AutoTransport, auto_transport
from rrfp.transports.cuda_ipc.transport import CudaIpcTransport
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.shm.trial import Host


def test_auto_takes_cuda_ipc_where_ranks_are_processes_with_devices() -> None:
    left, _ = makers.contexts()
    with_device = replace(left, copies=copies_of(SeparateDouble(), StreamLane))
    assert isinstance(auto_transport(with_device), InprocTransport)
    apart = replace(with_device, rendezvous=makers.Store())
    transport = auto_transport(apart)
    assert isinstance(transport, CudaIpcTransport)
    assert transport.carries == {"cpu", "double"}
    assert isinstance(auto_transport(replace(apart, copies=None)), AutoTransport)


class Abroad(CudaIpcTransport):
    """Says that it runs on another host."""

    def _host(self) -> Host:
        return replace(super()._host(), boot="another")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged of the choice."""
    caplog.set_level(logging.INFO, logger="rrfp.transports.auto")
    return lambda: sorted(record.getMessage() for record in caplog.records)


async def test_each_rank_logs_its_choice_once(lines: Callable[[], list[str]]) -> None:
    made = Ends([SeparateDouble(0.0), SeparateDouble(0.0), None, SeparateDouble(0.0)], allow_insecure=True)
    made.ranks[3] = Abroad(made.contexts[3])
    async with closing(made.devices), makers.started(*made.ranks):
        assert kinds(made.left) == {1: "TunnelLink", 2: "StagedLink", 3: "StagedLink"}
        for source in range(4):
            for target in {0, 1, 2, 3} - {source}:
                tensor = on(made.devices[source], source, target)
                await made.ranks[source].send(target, data(tensor, torch.ones(2), index=source))
                message = await receive(made.ranks[target])
                assert_same(message.tensors[0], tensor, f"from {source} to {target}")
                assert is_on(made.devices[target], message.tensors[0]) is (source != 2 and target != 2)
                assert_same(message.tensors[1], torch.ones(2), f"from {source} to {target}")
        await soon(asyncio.gather(*(rank.close() for rank in made.ranks)), "all close")
    abroad = "zmq (it runs on another host)"
    assert lines() == [
        f"transport of rank 0: cuda_ipc over shm with rank 1; shm with rank 2; {abroad} with rank 3",
        f"transport of rank 1: cuda_ipc over shm with rank 0; shm with rank 2; {abroad} with rank 3",
        f"transport of rank 2: shm with rank 0, 1; {abroad} with rank 3",
        f"transport of rank 3: {abroad} with rank 0, 1, 2",
    ]
    check_races(made.devices)


REASONS = {
    "share": "rank 1 cannot share memory: OSError: operation not supported",
    "open": "rank 1 cannot read memory of rank {peer}: OSError: invalid device context",
    "bytes": "rank 1 cannot read memory of rank {peer}: it brings other bytes",
    "fields": "cannot read memory of rank 1: what it published is malformed: size is -1, must be a whole number >= 1",
    "release": "cannot read memory of rank 1: ",
}


@pytest.mark.parametrize("part", REASONS)
async def test_a_pair_whose_trial_fails_stages_its_tensors_and_says_why(
    part: str, lines: Callable[[], list[str]]
) -> None:
    async with ends(SeparateDouble(0.0), refusing(part), SeparateDouble(0.0), may_race=True) as made:
        assert kinds(made.left) == {1: "StagedLink", 2: "TunnelLink"}
        assert kinds(made.right) == {0: "StagedLink", 2: "StagedLink"}
        for source, target in ((0, 1), (1, 0), (0, 2), (2, 1)):
            tensor = on(made.devices[source], source, target)
            await made.ranks[source].send(target, data(tensor))
            message = await receive(made.ranks[target])
            assert_same(message.tensors[0], tensor, f"from {source} to {target}")
            assert is_on(made.devices[target], message.tensors[0])
    first, second, third = lines()
    for line, peer in ((first, 0), (second, 0), (second, 2), (third, 2)):
        assert "shm, device tensors through host memory (" in line
        assert REASONS[part].format(peer=peer) in line


async def test_a_copy_of_the_trial_that_does_not_end_is_given_up(
    lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "TRIAL_S", 0.2)
    devices = SeparateDouble(0.0), SeparateDouble(lambda count: 0.0 if count <= 2 else 3600.0)
    async with ends(*devices, may_race=True) as made:
        assert [kinds(rank) for rank in made.ranks] == [{1: "StagedLink"}, {0: "StagedLink"}]
    assert all("(rank 1 cannot read memory of rank 0: it did not end within 0.2 s)" in line for line in lines())


async def test_a_rank_whose_device_is_full_takes_part_without_slots(lines: Callable[[], list[str]]) -> None:
    class Full(SeparateDouble):
        def empty(self, tensor: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("no memory is left")

    async with ends(SeparateDouble(0.0), Full(0.0)) as made:
        assert [kinds(rank) for rank in made.ranks] == [{1: "StagedLink"}, {0: "StagedLink"}]
    assert all("OutOfMemoryError: no memory is left)" in line for line in lines())
