"""Every transport keeps the contract."""

from __future__ import annotations

import pytest
import transports.makers as makers
import uvloop

from rrfp.testing.clock import run_virtual
from rrfp.testing.transport_check_data import check_large_tensor
from rrfp.testing.transport_check_flow import check_cancelled_receive
from rrfp.testing.transport_checks import ALL_CHECKS, Check, run_transport_checks

# complex32 is experimental to torch, which says so once.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("maker", makers.MAKERS)
async def test_contract(maker: str, check: Check) -> None:
    await check(makers.MAKERS[maker])


@pytest.mark.parametrize("maker", ["inproc", "simulated-late", "zmq-ipc"])
def test_contract_on_uvloop(maker: str) -> None:
    uvloop.run(run_transport_checks(makers.MAKERS[maker]))


#: Give up waiting again and again without a pause: virtual time stands still meanwhile, and what is late never comes.
SPINNING = (check_large_tensor, check_cancelled_receive)


@pytest.mark.parametrize(
    ("maker", "check"),
    [
        pytest.param(maker, check, id=f"{maker}-{check.__name__.removeprefix('check_')}")
        for maker in ("inproc", "simulated", "simulated-late")
        for check in ALL_CHECKS
        if maker != "simulated-late" or check not in SPINNING
    ],
)
def test_contract_in_virtual_time(maker: str, check: Check) -> None:
    run_virtual(check(makers.MAKERS[maker]))
