"""A job whose ports strangers attack trains as one that they leave alone."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from batches import long
from fork_server import fork_server  # noqa: F401 - a fixture
from runtime.processes import BATCH, Processes
from runtime.strangers import attacked
from torch.distributed import FileStore  # type: ignore[attr-defined]
from transports.curved import curve, over_plain_tcp

from rrfp.pipeline.blocking import BlockingPipeline
from rrfp.transports.registry import TransportSpec
from rrfp.transports.rendezvous import StoreRendezvous

RANKS, STEPS = 3, 10

pytestmark = pytest.mark.timeout(120)


def steps_under_attack(rank: int, pipe: BlockingPipeline, connection: Connection) -> Any:
    """Begins when the test says so; returns losses, the norm of all gradients, and the strangers that came."""
    connection.send("connected")
    connection.recv()
    losses = [pipe.step(BATCH.inputs, BATCH.targets).losses for _ in range(STEPS)]
    connection.send("done")
    connection.recv()  # all strangers have gone
    norm = float(pipe.clip_grad_norm_(1e9))
    (statistics,) = pipe.statistics()
    return losses, norm, statistics.transport.strangers


def addresses(store: Path) -> list[str]:
    """Where the ranks listen."""
    rendezvous = StoreRendezvous(FileStore(str(store), RANKS), run_id="test")

    async def look() -> list[str]:
        found = [await rendezvous.lookup(f"zmq/local/0/0/{rank}", 5.0) for rank in range(RANKS)]
        return [endpoint.decode().split(" ")[0] for endpoint in found]

    return asyncio.run(look())


def trained(folder: Path, *, is_attacked: bool, **options: Any) -> list[Any]:
    """What each rank returns."""
    folder.mkdir()
    ranks = Processes(folder, RANKS, steps_under_attack, **options)
    try:
        for rank in range(RANKS):
            assert ranks.hear(rank) == "connected"
        with attacked(addresses(folder / "store") if is_attacked else []) as strangers:
            for connection in ranks.connections:
                connection.send("go")
            for rank in range(RANKS):
                assert ranks.hear(rank) == "done"
        assert all(each.count for each in strangers)
        for connection in ranks.connections:
            connection.send("go")
        ends = [ranks.end(rank) for rank in range(RANKS)]
    finally:
        ranks.kill()
    assert [end.error for end in ends] == [""] * RANKS
    return [end.value for end in ends]


@pytest.mark.parametrize(
    ("transport", "is_secret"), [(curve, True), long(over_plain_tcp, False)], ids=["secret", "insecure"]
)
def test_strangers_change_no_bit_and_are_counted(transport: TransportSpec, is_secret: bool, tmp_path: Path) -> None:
    options = {"transport": transport, "allow_insecure": not is_secret}
    alone = trained(tmp_path / "alone", **options, is_attacked=False)
    under_attack = trained(tmp_path / "attacked", **options, is_attacked=True)
    assert [value[:2] for value in under_attack] == [value[:2] for value in alone]
    assert [value[2] for value in alone] == [0] * RANKS
    assert all(value[2] > 0 for value in under_attack)
