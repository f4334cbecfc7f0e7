"""The public suite for transports, with tensors on the device.

On the double only its checks of data: `tests/transports/test_conformance.py` runs all of them there.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
import transports.on_device as on_device
import transports.remote as remote
from fork_server import fork_server

from benchmarks.gpu.target import Target
from rrfp.testing.transport_checks import ALL_CHECKS, SkippedError

__all__ = ["fork_server"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    # complex32 is experimental to torch, which says so once.
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

#: By device.
MAKERS = {
    "cuda": on_device.ON_CUDA | remote.ON_CUDA,
    "stub": on_device.ON_CUDA | remote.ON_CUDA,
    "double": {
        **{name: on_device.MAKERS[name] for name in ("staged-shm", "staged-zmq")},
        "inproc": on_device.MAKERS["inproc-device"],
        "cuda-ipc": remote.MAKERS["cuda-ipc-process"],
    },
}


@pytest.mark.parametrize("name", MAKERS["double"])
async def test_the_public_suite(name: str, target: Target) -> None:
    for check in ALL_CHECKS:
        if target.is_cuda or check.__module__.endswith(".data"):
            with suppress(SkippedError):
                await check(MAKERS[target.name][name])
