"""A rank that is lost in a step, which the others finish (``on_lost_rank="finish"``)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fork_server import fork_server  # noqa: F401 - a fixture
from runtime import lost_ranks
from runtime.lost_ranks import LAST, STAGES, LostRanks, expected
from runtime.toys import TOLERANCE


def close(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(
        torch.allclose(a, b, rtol=0.0, atol=TOLERANCE) for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_the_others_finish_the_step(victim: int, tmp_path: Path) -> None:
    ranks = LostRanks(tmp_path, lost_ranks.finishes, victim)
    try:
        holder = victim ^ 1
        assert ranks.hear(victim) == "here"
        assert ranks.hear(holder) == "copied"
        ranks.strike(victim)
        left = sorted({*range(4)} - {victim})
        ends = ranks.ends(left)
    finally:
        ranks.kill()
    loss, gradients, losses, parameters = expected(2, LAST + 1)[LAST]
    for rank, end in ends.items():
        assert not end.error, f"rank {rank}: {end.error}: {end.text}"
        stage, replica = divmod(rank, 2)
        own_loss, own_losses, lost, own_gradients, own_parameters, _, step, _ = end.value
        assert lost == (victim,)
        assert abs(own_loss - loss) < TOLERANCE
        assert close([torch.tensor(own_losses)], [torch.tensor(losses[replica])])
        assert close(own_gradients, gradients[stage])
        assert close(own_parameters, parameters[stage])
        assert step == LAST + 1
    assert STAGES == 2
