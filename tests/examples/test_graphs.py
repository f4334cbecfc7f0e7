"""The examples of graphs: the same model as chain, branch and co-located, and two models beside their plain loops."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from batches import long
from fork_server import fork_server, printed, run

__all__ = ["fork_server"]

EXAMPLES = Path(__file__).parents[2] / "examples"
MULTIMODAL = EXAMPLES / "train_multimodal.py"
SMALL = ("--steps", "3", "--microbatches", "6", "--microbatch-size", "2")

#: Losses are printed with six digits, and differ by less than the last of them.
TOLERANCE = 1.5e-6

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def losses(form: str, *arguments: str, ranks: int | None = None) -> list[float]:
    """What the example prints: the losses of steps, the held-out loss, and the one without pictures and sounds."""
    output = printed(MULTIMODAL, "--graph", form, *arguments, ranks=ranks, timeout_s=110)
    assert f"{form}: median step " in output
    found = re.findall(r"(?:loss|sounds) (\d\S+?),?(?:\s|$)", output)
    return [float(loss) for loss in found]


def test_a_chain_a_branch_and_colocated_parts_train_the_same_model() -> None:
    chain = losses("chain", *SMALL)
    assert len(chain) == 5
    assert chain[2] < chain[0]
    for form, stages in (("branch", "5"), ("colocated", "2")):
        assert losses(form, *SMALL, "--stages", stages) == pytest.approx(chain, abs=TOLERANCE), form


@pytest.mark.parametrize(("form", "ranks"), [("colocated", 2), long("branch", 3), long("chain", 3), long("branch", 5)])
def test_stages_in_processes_train_as_in_one(form: str, ranks: int) -> None:
    assert losses(form, *SMALL, ranks=ranks) == pytest.approx(losses(form, *SMALL), abs=TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize("form", ["chain", "branch", "colocated"])
def test_the_model_learns_to_see_and_to_hear(form: str) -> None:
    first, *_, held_out, without = losses(form)
    assert first > 3
    assert held_out < 0.1
    assert without > 0.4


@pytest.mark.parametrize(("form", "stages", "allowed"), [("branch", "2", "3..7"), long("colocated", "5", "1..4")])
def test_a_number_of_stages_that_does_not_fit_is_one_line(form: str, stages: str, allowed: str) -> None:
    (ended,) = run(MULTIMODAL, "--graph", form, "--stages", stages)
    assert ended.code == 2
    expected = f"train_multimodal.py: the number of stages is {stages}, must be {allowed} with --graph {form}\n"
    assert ended.errors == expected


@pytest.mark.parametrize("model", [long("encoder-decoder"), "unet"])
def test_an_encoder_decoder_and_a_unet_have_the_gradients_of_the_plain_loop(model: str) -> None:
    rows = re.findall(
        r"loss (\S+), largest difference to the plain loop (\S+)", printed(EXAMPLES / "graphs.py", "--model", model)
    )
    assert len(rows) == 9
    assert max(float(difference) for _, difference in rows) < 1e-12
    assert float(rows[-1][0]) < 0.6 * float(rows[0][0])
