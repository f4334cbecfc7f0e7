"""Virtual time for tests of plugins: `run_virtual` is ``asyncio.run`` on a loop whose clock jumps to the next timer.

A transport, hint or stage program that reads only its loop's clock runs unchanged. A stall of ten seconds takes no
time, and every run of a test has the same order and the same floats::

    def test_a_poll_comes_after_a_minute() -> None:
        assert run_virtual(my_plugin.first_poll()) == 60.0

A whole pipeline runs in virtual time with ``rrfp.local(programs, loop="caller", transport="simulated", lane=...)``,
where ``lane`` makes the stages' `TimerLane`s and the programs are `EmulatedStage`s, whose tasks last on these lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rrfp.laboratory import PUBLIC
from rrfp.lazy_names import lazy_names

# For type checkers: `as` marks a public name.
if TYPE_CHECKING:
    from rrfp.lab.emulated import EmulatedStage as EmulatedStage
    from rrfp.lab.simulated_transport import SimulatedTransport as SimulatedTransport
    from rrfp.lab.timer_lane import TimerLane as TimerLane
    from rrfp.lab.virtual_clock import VirtualClockLoop as VirtualClockLoop
    from rrfp.lab.virtual_clock import run_virtual as run_virtual

__all__, __getattr__, __dir__ = lazy_names(__name__, PUBLIC[__name__])
