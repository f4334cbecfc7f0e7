"""Ranks that were not given the same: one clear error, the same on all, at once, whatever the transport."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from typing import Any
from unittest.mock import patch

import pytest
import torch
from runtime.ranks import SOON_S, ThreadedRanks, step
from runtime.toys import loss_fn, stages

import rrfp
from rrfp.errors import ConfigError
from rrfp.hints.slot_aware import SlotAware
from rrfp.transports.rendezvous import LocalRendezvous

#: What stage 2 of 4 is given, what all others are, and what all are told.
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "placement": ({"placement": "v"}, {}, "placement is 'looped' on stage 0 and 'v' on stage 2"),
    "split": ({"split": True}, {}, "split is False on stage 0 and True on stage 2"),
    "hint": ({"hint": "bfw"}, {"hint": "bf"}, "hint is 'bf' on stage 0 and 'bfw' on stage 2"),
    "hint's class": (
        {"hint": SlotAware},
        {},
        "hint is 'slot-aware-pyramid' on stage 0 and 'rrfp.hints.slot_aware.SlotAware' on stage 2",
    ),
    "limit": ({"limit": "n"}, {}, "limit is '2n' on stage 0 and 'n' on stage 2"),
    "first step": ({"first_step": 10}, {}, "first_step is 0 on stage 0 and 10 on stage 2"),
    "deterministic": ({}, {"deterministic": True}, "deterministic is True on stage 0 and False on stage 2"),
    "seed": ({"seed": 7}, {}, "seed is 0 on stage 0 and 7 on stage 2"),
    "reduction": ({"reduction": "sum"}, {}, "reduction is 'mean' on stage 0 and 'sum' on stage 2"),
    "strict": ({"strict": "1f1b"}, {"strict": "gpipe"}, "strict is 'gpipe' on stage 0 and '1f1b' on stage 2"),
    "strict on one": (
        {"strict": "1f1b"},
        {},
        "hint is 'slot-aware-pyramid' on stage 0 and None on stage 2; strict is None on stage 0 and '1f1b' on stage 2; "
        "limit is '2n' on stage 0 and None on stage 2",
    ),
    "stages": (
        {"topology": rrfp.Topology(2, 5)},
        {},
        "stages is 4 on stage 0 and 5 on stage 2",
    ),
}


@pytest.mark.parametrize("seeds", [(3, 4), (3, 3)])
def test_ranks_that_follow_torchs_seed_must_have_seeded_it_alike(seeds: tuple[int, int]) -> None:
    met, pipelines = LocalRendezvous(), []
    with torch.random.fork_rng(devices=[]):
        for stage, (module, seed) in enumerate(zip(stages(2), seeds, strict=True)):
            torch.manual_seed(seed)
            options: Any = {"rendezvous": met, "transport": "inproc", "name": f"seeds{seeds}", "loss_fn": loss_fn}
            topology = rrfp.Topology(stage, 2)
            with patch("rrfp.pipeline.api._numbers", defaultdict(lambda: itertools.repeat(0))):
                pipelines.append(rrfp.Pipeline(module, topology=topology, seed=None, lock_watch=False, **options))

    async def enter() -> list[BaseException | None]:
        entered = await asyncio.gather(*(each.__aenter__() for each in pipelines), return_exceptions=True)
        inside = [one for one, how in zip(pipelines, entered, strict=True) if not isinstance(how, BaseException)]
        await asyncio.gather(*(each.__aexit__(None, None, None) for each in inside))
        return [each if isinstance(each, BaseException) else None for each in entered]

    text = (
        "seed is 'torch.initial_seed() = 3' on stage 0 and 'torch.initial_seed() = 4' on stage 1: must be the same on "
        "all ranks"
    )
    wanted = "None" if seeds == (3, 3) else text
    assert list(map(str, asyncio.run(enter()))) == [wanted] * 2
    assert [each.state_dict()["seed"] for each in pipelines] == list(seeds)


def told(parts: list[Any], own: dict[int, Any], options: dict[str, Any]) -> str:
    """What every rank is told, within the time that it may take."""
    given = {stage: own.get(stage, options) for stage in range(len(parts))}
    began = time.monotonic()
    outcomes = ThreadedRanks(parts, step, given).join()
    assert max(outcome.ended for outcome in outcomes) - began < SOON_S
    assert [type(outcome.error) for outcome in outcomes] == [ConfigError] * len(parts)
    (text,) = {str(outcome.error) for outcome in outcomes}
    return text


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_rank_that_differs_is_one_error_on_all(name: str) -> None:
    own, others, text = DIFFERENCES[name]
    assert told([*stages(4)], {2: own}, others) == f"{text}: must be the same on all ranks"


@pytest.mark.parametrize("transport", ["inproc", "zmq"])
@pytest.mark.parametrize("odd", [0, 3])
def test_a_wrong_number_of_chunks_is_told_though_the_ranks_would_wait_for_other_peers(transport: str, odd: int) -> None:
    parts: list[Any] = [[a, b] for a, b in zip(stages(4), stages(4, seed=1), strict=True)]
    parts[odd] = stages(1)[0]
    text = told(parts, {}, {"transport": transport})
    ours, theirs = (1, 2) if odd == 0 else (2, 1)
    assert text == f"chunks is {ours} on stage 0 and {theirs} on stage {odd or 1}: must be the same on all ranks"
