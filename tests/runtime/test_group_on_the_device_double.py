"""A group with replicas on devices: in a file of its own, as it forks ranks and runs of the other file fork none."""

from __future__ import annotations

import fork_server as forked
import pytest
from fork_server import fork_server
from on_device import DEPTH
from runtime.toys import TOLERANCE

__all__ = ["fork_server"]


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_group_with_replicas_has_the_references_gradients_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEPTH, "2")
    found = forked.reports("runtime/torchrun_tensor_parallel.py", "one double", ranks=4, timeout_s=90)
    gaps = [gap for report in found for gap in report["worst"].values()]
    assert len(gaps) == 4
    assert max(gaps) < TOLERANCE
