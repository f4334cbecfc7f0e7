"""A job whose ports strangers attack trains as one that they leave alone."""

from __future__ import annotations

import asyncio
import re
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from batches import long
from fork_server import fork_server  # noqa: F401 - a fixture
from runtime.processes import BATCH, Processes, Slow
from runtime.strangers import attacked
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.nn.modules.module import register_module_forward_pre_hook
from transports.curved import curve, over_plain_tcp

from rrfp.pipeline.faces import BlockingPipeline
from rrfp.transports.registry import TransportSpec
from rrfp.transports.rendezvous import StoreRendezvous
from rrfp.transports.secret import split_voucher

RANKS, STEPS = 3, 10

#: Bytes by which a rank may grow while it is attacked.
MOST_GROWTH = 64 << 20

pytestmark = pytest.mark.timeout(120)


def steps_under_attack(rank: int, pipe: BlockingPipeline, connection: Connection) -> Any:
    """Begins when the test says so; returns losses, all gradients' bytes, growth, and the strangers that came."""
    modules: dict[int, nn.Module] = {}

    def see(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, Slow):
            modules[id(module)] = module

    connection.send("connected")
    connection.recv()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    with register_module_forward_pre_hook(see):
        losses = [pipe.step(BATCH.inputs, BATCH.targets).losses for _ in range(STEPS)]
    connection.send("done")
    connection.recv()  # all strangers have gone
    gradients = [
        (name, parameter.grad.numpy().tobytes())
        for module in modules.values()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    ]
    assert gradients
    (statistics,) = pipe.statistics()
    return losses, gradients, memory("VmHWM") - before, statistics.transport.strangers


def memory(field: str) -> int:
    """Bytes of this process."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def addresses(store: Path) -> list[str]:
    """Where the ranks listen."""
    rendezvous = StoreRendezvous(FileStore(str(store), RANKS), run_id="test")

    async def look() -> list[str]:
        found = [await rendezvous.lookup(f"zmq/local/0/0/{rank}", 5.0) for rank in range(RANKS)]
        return [split_voucher(endpoint)[1].decode().split(" ")[0] for endpoint in found]

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
    assert [strangers for *_, strangers in alone] == [0] * RANKS
    assert all(strangers > 0 for *_, strangers in under_attack)
    assert all(growth < MOST_GROWTH for *_, growth, _ in under_attack)
