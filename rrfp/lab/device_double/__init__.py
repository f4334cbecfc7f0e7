"""An asynchronous device on a CPU: to test, without a GPU, the code that drives one.

Operators issued on a stream of `DoubleDevice` compute at once. When the block ends, every storage that they wrote is
covered: its bytes are put aside and 0xFF (NaN, -1) stands in their place, until the device has "run" the block, some
time later. A stream runs its work in order. While a block issues work on a stream, exactly that pending work is
uncovered which the stream's order implies: its own, and that of other streams before the events that it waited for. So
who reads too early reads garbage: another stream without an event, a transport, the loop, the caller. Threads may be
in blocks of different streams at the same time, as on a device; then what one of them uncovers is uncovered for all.

A race need not show in results, less so between such threads. So the device also looks for some and reports them in
`DoubleDevice.problems`:

- a block uses memory that pending work of another stream writes, or writes memory that such work reads;
- memory that pending work reads, and that its stream did not make, is freed without `Device.note_use`, or written to;
- memory that pending work writes is written to by the host;
- an event is used after its release, or its time before it was reached, or without having one;
- memory that was noted, or is for copies, is freed after the device has failed and before `DoubleDevice.keep_noted`.

All tensors are on the CPU. To the device every one lies in its memory, except those from `DoubleDevice.empty_on_host`:
so `holds` is true of parameters and inputs, as on a GPU to which everything was moved.
"""

from __future__ import annotations

from rrfp.lab.device_double.device import DoubleDevice
from rrfp.lab.device_double.stream import DoubleStream
from rrfp.lab.device_double.timeline import DoubleError, DoubleEvent

__all__ = ["DoubleDevice", "DoubleError", "DoubleEvent", "DoubleStream"]
