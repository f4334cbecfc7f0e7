"""Training between real processes whose ranks pull from each other's devices: doubles."""

from __future__ import annotations

from pathlib import Path

import pytest
from compute.gloo_ranks import GOOD, outcomes
from fork_server import fork_server

__all__ = ["fork_server"]


@pytest.mark.parametrize("case", ["staging_s_bits", "the_reference_s_gradients"])
def test_gradients_over_cuda_ipc_are(case: str, tmp_path: Path) -> None:
    found = outcomes("runtime.cuda_ipc_cases", [case], 4, tmp_path)[case]
    assert found == [GOOD] * 4, "\n".join(found)
