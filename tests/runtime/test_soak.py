"""Four ranks make thousands of steps of ragged shapes over shared memory: memory, descriptors and slots stay flat."""

from __future__ import annotations

from pathlib import Path

import pytest
import runtime.ragged_steps as ragged
from fork_server import fork_server
from runtime.processes import Processes

__all__ = ["fork_server"]

#: A rank maps what it sends and what it receives: to and from two neighbours, on forward and backward. At once lent are
#: the microbatches of a step, and one more whose end is not seen yet.
_LENT_BYTES = 4 * (ragged.MICROBATCHES + 1) * (ragged.LARGEST_BYTES + ragged.LARGEST_BYTES // 8 + 8192)
_SLOT_BYTES = 3 * ragged.IDLE_BYTES + _LENT_BYTES

#: By so much a process may grow after its first fifth: fragments of the allocator's.
_GROWTH_BYTES = 8 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps", [30, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])], ids="{} steps".format
)
def test_a_soak_leaves_memory_descriptors_and_slots_flat(steps: int, tmp_path: Path) -> None:
    ranks = Processes(tmp_path, 4, ragged.ragged_steps, 0.0, transport="shm")
    try:
        for connection in ranks.connections:
            connection.send(steps)
        for stage in range(4):
            assert ranks.connections[stage].poll(1700 if steps > 1000 else 50), f"rank {stage} does not end"
            end = ranks.end(stage)
            assert end.error == "", end.text
            first, *others = end.value
            assert first.slots > 4  # tensors did travel in slots
            for sample in (first, *others):
                # A slot on its way has one for a moment.
                assert sample.descriptors <= first.descriptors + 8, end.value
                assert sample.slot_bytes <= _SLOT_BYTES, end.value
                assert sample.other_bytes <= first.other_bytes + _GROWTH_BYTES, end.value
    finally:
        ranks.kill()
