"""A rank that is lost in a step, which the others finish (``on_lost_rank="finish"``)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fork_server import fork_server  # noqa: F401 - a fixture
from runtime import lost_ranks
from runtime.lost_ranks import LAST, STAGES, LostRanks, expected
from runtime.toys import TOLERANCE

import rrfp
from rrfp.model.mesh import Mesh
from rrfp.pipeline.lost_rank.roll_call import Answer, Decision


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


class TestDecision:
    """What follows from the answers of those that are left, of two stages by so many replicas."""

    def of(self, replicas: int, *answers: Answer) -> Decision:
        return Decision.of(answers, rrfp.Topology.at(0, Mesh((("pp", 2), ("dp", replicas)))))

    def test_whole_replicas_run_the_step_again(self) -> None:
        decision = self.of(2, Answer(0, 5, True), Answer(1, 5, False), Answer(2, 5, True))
        assert decision == Decision((0, 1, 2), (3,), 5, "", (0,))
        assert decision.ranks(rrfp.Topology.at(0, Mesh((("pp", 2), ("dp", 2))))) == [0, 2]
        assert decision.takes_over(0, 2) == 1

    def test_each_of_several_broken_replicas_has_a_holder_of_its_own(self) -> None:
        decision = self.of(4, *(Answer(rank, 1, True) for rank in range(8) if rank not in (0, 5)))
        assert (decision.why, decision.whole) == ("", (2, 3))
        assert [decision.takes_over(replica, 4) for replica in (2, 3)] == [0, 1]

    def test_a_replica_whose_holder_is_broken_too_cannot_be_replaced(self) -> None:
        decision = self.of(3, *(Answer(rank, 1, True) for rank in range(6) if rank not in (0, 4)))
        assert decision.why == "Replicas 0 and 1 have lost ranks, and the second had the first one's microbatches"

    def test_a_step_that_some_ranks_know_to_be_complete_is_not_run_again(self) -> None:
        decision = self.of(2, Answer(0, 6, True), Answer(1, 5, True), Answer(2, 5, True))
        assert (decision.step, bool(decision.why)) == (6, True)

    def test_without_the_lost_microbatches_it_is_not_run_again(self) -> None:
        decision = self.of(2, Answer(0, 5, True), Answer(1, 5, True), Answer(2, 5, False))
        assert decision.why.startswith("The loss came before the others had the lost microbatches")

    def test_a_rank_that_cannot_go_back_says_why(self) -> None:
        decision = self.of(2, Answer(0, 5, True), Answer(1, 5, True, "it has gradients"), Answer(2, 5, True))
        assert decision.why == ("The step cannot be run again, because of stage 0, dp 1 (rank 1): it has gradients")
