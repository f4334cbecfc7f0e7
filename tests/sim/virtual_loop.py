"""The running loop of a test in virtual time."""

from __future__ import annotations

import asyncio

from rrfp.testing.clock import VirtualClockLoop


def here() -> VirtualClockLoop:
    """The running loop, which has to be a virtual one."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockLoop)
    return loop
