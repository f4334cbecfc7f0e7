"""Pipelines of one process pair by name; ranks that were given something else end with an error that names both."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from runtime.toys import data, loss_fn, stages

import rrfp
from rrfp.errors import ConfigError, TransportError
from rrfp.transports.rendezvous import LocalRendezvous

Names = Sequence[str | None]


class TwoRanks:
    """Makes the pipelines of two ranks, which count them as processes of their own would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.rendezvous = LocalRendezvous()

    def make(self, rank: int, names: Names, **options: Any) -> list[rrfp.Pipeline]:
        self._monkeypatch.setattr("rrfp.pipeline.api._numbers", defaultdict(itertools.count))
        given: dict[str, Any] = {"transport": "inproc", "loss_fn": loss_fn, "rendezvous": self.rendezvous, **options}
        place = rrfp.Topology(rank, 2)
        return [rrfp.Pipeline(stages(2)[rank], topology=place, name=name, **given) for name in names]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> TwoRanks:
    return TwoRanks(monkeypatch)


def meet(first: rrfp.Pipeline, second: rrfp.Pipeline) -> list[Any]:
    """What a training step gives on both ranks, or the error that it ends with."""
    batch = data(3)

    def body(pipeline: rrfp.Pipeline) -> Any:
        try:
            with pipeline.blocking() as pipe:
                return pipe.step(batch.inputs, batch.targets).losses
        except rrfp.RrfpError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(body, (first, second)))


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), ("a", None)])
def test_names_pair_whatever_the_order_in_which_pipelines_are_made(ranks: TwoRanks, names: Names) -> None:
    ours, theirs = ranks.make(0, names), ranks.make(1, names[::-1])
    for pair in zip(ours, theirs[::-1], strict=True):
        losses, same = meet(*pair)
        assert losses == same
        assert len(losses) == 3


@pytest.mark.parametrize("transport", ["inproc", "zmq"])
@pytest.mark.parametrize("name", ["a", None])
def test_pipelines_of_one_name_pair_in_their_order_over_one_rendezvous(
    ranks: TwoRanks, name: str | None, transport: str
) -> None:
    names = [name, name]
    made = (ranks.make(rank, names, transport=transport) for rank in range(2))
    for pair in zip(*made, strict=True):
        losses, same = meet(*pair)
        assert losses == same


def test_a_rank_that_skipped_a_pipeline_is_named_with_the_one_it_is_at(ranks: TwoRanks) -> None:
    (ours,), (theirs,) = ranks.make(0, ["a"], connect_timeout=0.2), ranks.make(1, ["b"], connect_timeout=0.2)
    first, second = meet(ours, theirs)
    assert isinstance(first, TransportError)
    assert str(first).startswith("stage 1 did not come to pipeline 'a.0', it is at pipeline 'b.0': no rank published")
    assert isinstance(second, TransportError)
    assert str(second).startswith("stage 0 did not come to pipeline 'b.0', it is at pipeline 'a.0': no rank published")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hint": "bf"}, "hint is 'slot-aware-pyramid' on stage 0 and 'bf' on stage 1"),
        ({"limit": 3}, "limit is '2n' on stage 0 and \"the rank's own\" on stage 1"),
        (
            {"limit": "n", "seed": 1},
            "limit is '2n' on stage 0 and 'n' on stage 1; seed is 0 on stage 0 and 1 on stage 1",
        ),
    ],
)
def test_pipelines_that_pair_and_were_given_other_options_are_refused(
    ranks: TwoRanks, options: dict[str, Any], text: str
) -> None:
    (ours,), (theirs,) = ranks.make(0, [None]), ranks.make(1, [None], **options)
    outcomes = meet(ours, theirs)
    assert [type(outcome) for outcome in outcomes] == [ConfigError] * 2
    assert {str(outcome) for outcome in outcomes} == {f"{text}: must be the same on all ranks"}


def test_a_pipeline_that_is_refused_when_it_is_made_counts(ranks: TwoRanks) -> None:
    """Or the next one of this rank would pair with the one that the others did make."""
    _, ours = ranks.make(0, [None, None])
    with pytest.raises(ConfigError, match=r"seed is 1\.5"):
        ranks.make(1, [None], seed=1.5)
    theirs = rrfp.Pipeline(
        stages(2)[1], topology=rrfp.Topology(1, 2), transport="inproc", loss_fn=loss_fn, rendezvous=ranks.rendezvous
    )
    losses, same = meet(ours, theirs)
    assert losses == same


@pytest.mark.parametrize("name", ["", "a/b", "x" * 65, 3, b"a"])
def test_a_name_that_cannot_be_one_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"name is .*, must be a text of 1..64 characters without '/'"):
        rrfp.Pipeline(stages(1)[0], topology=rrfp.Topology(0, 1), name=name)
