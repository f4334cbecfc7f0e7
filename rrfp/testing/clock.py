"""Virtual time for tests of plugins: `run_virtual` is ``asyncio.run`` on a loop whose clock jumps to the next timer.

A transport, hint or stage program that reads only its loop's clock runs unchanged. A stall of ten seconds takes no
time, and every run of a test has the same order and the same floats::

    def test_a_poll_comes_after_a_minute() -> None:
        assert run_virtual(my_plugin.first_poll()) == 60.0

A whole pipeline runs in virtual time with ``rrfp.local(programs, loop="caller", transport="simulated", lane=...)``,
where ``lane`` makes the stages' `TimerLane`s and the programs are `EmulatedStage`s, whose tasks last on these lanes.
"""

from rrfp.compute.emulated import EmulatedStage
from rrfp.compute.lanes.timer import TimerLane
from rrfp.sim.virtual.clock import VirtualClockLoop, run_virtual
from rrfp.transports.simulated import SimulatedTransport

__all__ = ["EmulatedStage", "SimulatedTransport", "TimerLane", "VirtualClockLoop", "run_virtual"]
