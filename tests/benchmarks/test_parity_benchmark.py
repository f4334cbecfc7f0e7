"""Trainings by every method end with the bits that they are to have, and what is kept is not run again."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from fork_server import fork_server, printed

from benchmarks.parity.figures import Outcome, document_of, rows_of
from benchmarks.parity.run import kept_of, trained
from benchmarks.parity.settings import GPT, METHODS, MULTIMODAL, ONE_PROCESS, SEEDS, STAGES, Settings, wanted
from benchmarks.shared.options import text_of

__all__ = ["fork_server"]

WORKER = Path(__file__).resolve().parents[2] / "benchmarks" / "parity" / "worker.py"

needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


def outcomes_of(settings: Settings) -> list[Outcome]:
    output = printed(WORKER, settings.to_json(), ranks=STAGES, timeout_s=150)
    return [Outcome.of(json.loads(line)) for line in output.splitlines() if line.startswith("{")]


def check_bits(settings: Settings) -> None:
    rows = list(rows_of(outcomes_of(settings)))
    assert [row.method for row in rows] == list(settings.methods)
    for row in rows:
        assert row.same_bits or not row.fixes_bits, row
        assert row.largest < 1e-3, row
        assert (row.largest == 0) or not row.same_bits, row


@pytest.mark.timeout(180)
def test_a_deterministic_training_has_the_bits_of_one_process() -> None:
    methods = (ONE_PROCESS, "default, deterministic")
    check_bits(Settings(MULTIMODAL, SEEDS[0], methods, iterations=2, evaluated_every=1, microbatches=3))


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("model", [pytest.param(GPT, marks=needs_megatron), MULTIMODAL])
def test_every_method_trains_and_those_that_fix_bits_have_those_of_one_process(model: str) -> None:
    check_bits(Settings(model, SEEDS[0], tuple(METHODS[model]), iterations=4, evaluated_every=2, microbatches=4))


def outcome(seed: int, method: str, *losses: float, sha256: str = "a") -> Outcome:
    return Outcome(GPT, seed, method, losses, tuple(enumerate(losses, 1)), sha256, 1.0)


def test_differences_are_those_from_one_process_of_the_same_seed_beside_the_spread_of_seeds() -> None:
    own = [
        outcome(42, ONE_PROCESS, 4.0, 2.0),
        outcome(42, "bf", 4.0, 2.25, sha256="b"),
        outcome(1234, ONE_PROCESS, 3.0, 2.5),
    ]
    reference, bf, other = rows_of(own)
    assert (reference.same_bits, reference.largest, reference.of_spread) == (True, 0.0, 0.0)
    assert (bf.same_bits, bf.fixes_bits, bf.largest, bf.largest_evaluated, bf.of_spread) == (
        False,
        False,
        0.25,
        0.25,
        0.5,
    )
    assert other.largest == 0
    assert [row.of_spread for row in rows_of(own[:2])] == [None, None]  # one seed has no spread


def test_results_are_kept_as_text_that_reads_back() -> None:
    own = [outcome(42, ONE_PROCESS, *(10.0 - n for n in range(20)))]
    document = json.loads(text_of(document_of(own)))
    assert document["rows"][0]["last"] == -9.0
    assert document["trainings"][0]["losses"] == [1.0, -9.0]  # every tenth


def test_trainings_that_are_kept_do_not_run_again(tmp_path: Path) -> None:
    settings = Settings(GPT, 42, (ONE_PROCESS, "bf"), iterations=2)
    kept = [outcome(42, name, 3.0, 2.0) for name in settings.methods]
    for each, name in zip(kept, ("one-process", "bf"), strict=True):
        line = {key: getattr(each, key) for key in each.__slots__}
        (tmp_path / f"gpt-42-2-50-8-{name}.json").write_text(json.dumps(line))
    assert list(trained(settings, tmp_path)) == kept
    assert list(trained(replace(settings, methods=("bf",)), tmp_path)) == kept[1:]
    assert list(kept_of(replace(settings, methods=("torch 1F1B", "bf")), tmp_path)) == ["bf"]


def test_one_seed_is_trained_by_every_method_and_the_others_show_the_spread() -> None:
    assert list(wanted(full=False)) == [
        (GPT, 42, tuple(METHODS[GPT])),
        (GPT, 1234, (ONE_PROCESS,)),
        (GPT, 2026, (ONE_PROCESS,)),
    ]
    assert len(list(wanted(full=True))) == 2 * len(SEEDS)
