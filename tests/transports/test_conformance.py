"""Every transport keeps the contract."""

from __future__ import annotations

import pytest
import transports.makers as makers
import uvloop

from rrfp.testing.transport_checks import ALL_CHECKS, Check, run_transport_checks

# complex32 is experimental to torch, which says so once.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("maker", makers.MAKERS)
async def test_contract(maker: str, check: Check) -> None:
    await check(makers.MAKERS[maker])


@pytest.mark.parametrize("maker", ["inproc", "zmq-ipc"])
def test_contract_on_uvloop(maker: str) -> None:
    uvloop.run(run_transport_checks(makers.MAKERS[maker]))
