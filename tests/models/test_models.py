"""Real models of transformers, diffusers and peft as pipelines, against the unsplit model in a plain loop."""

from __future__ import annotations

import functools
import random
from itertools import cycle
from typing import Any

import pytest
import torch
from models.case import Case
from models.catalogue import CONFIGURATIONS, STAGES, WITHOUT_ORDER, Configuration, build, load, runs, stages_of
from models.training import TOLERANCE, Step, errors, train, train_plainly
from runtime.toys import placed
from torch import nn
from transports.reordering import reordered

import rrfp
from rrfp.compute.split import backward as split_backward
from rrfp.transports.inproc import InprocTransport

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # libraries of models take seconds to import, and that is on a quiet machine
    # In peft, of transformers.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

#: What `make test` runs, in turns in one of two configurations; everything else is left to `make test-long`.
USUAL_MODELS = ("clip", "gpt2", "llava", "lora", "mixtral", "t5", "unet")
USUAL = {
    *zip(USUAL_MODELS, cycle(("bfw-deferred-deterministic", "bf")), strict=False),
    *(("assigned", "default"), ("packed", "default-deterministic"), ("rotary", "default")),
}
RUNS = [pytest.param(*run, marks=() if run in USUAL else pytest.mark.long) for run in runs()]


@functools.cache
def expected(name: str) -> list[Step]:
    return train_plainly(load(name))


def train_locally(
    case: Case, configuration: Configuration, monkeypatch: pytest.MonkeyPatch, **further: Any
) -> list[Step]:
    """Train all stages in this process; parameters that several share are one object."""
    model = build(case)
    stages = stages_of(case, model)
    parts: Any = placed(stages, len(stages) // 2, "v") if "placement" in further else stages
    if configuration.defer_all:
        monkeypatch.setattr(split_backward, "MIN_FLOPS", 0.0)
    with rrfp.local(parts, **configuration.options(case), **further).blocking() as pipe:
        return train(case, pipe, configuration, model, model)


@pytest.mark.parametrize(("name", "chosen"), RUNS)
def test_losses_gradients_and_norms_are_the_unsplit_models(
    name: str, chosen: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In every step of an optimizer, over ragged and weighted microbatches; tied weights have their sum."""
    configuration = CONFIGURATIONS[chosen]
    actual = train_locally(load(name), configuration, monkeypatch)
    assert max(errors(actual, expected(name), in_order=configuration.deterministic)) < TOLERANCE
    assert "is not split" not in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, count in STAGES.items() if count == 4])
@pytest.mark.parametrize("chosen", CONFIGURATIONS)
def test_a_v_placement_gives_the_same(name: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with two chunks each; embedding and head are on one."""
    configuration = CONFIGURATIONS[chosen]
    actual = train_locally(load(name), configuration, monkeypatch, placement="v")
    assert max(errors(actual, expected(name), in_order=configuration.deterministic)) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(STAGES.keys() - WITHOUT_ORDER))
def test_deterministic_steps_have_the_same_bits_whatever_the_hint_and_the_order_of_arrival(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []
    for number, configuration in enumerate(CONFIGURATIONS.values()):
        if configuration.deterministic:
            transport = reordered(InprocTransport, random.Random(number).randrange)
            with monkeypatch.context() as patched:
                trained.append(train_locally(load(name), configuration, patched, transport=transport))
    first, *others = trained
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert (one.loss, one.losses, one.norm) == (two.loss, two.losses, two.norm)
            for here, there in ((one.gradients, two.gradients), (one.buffers, two.buffers)):
                assert [key for key, tensor in here.items() if not torch.equal(tensor, there[key])] == []


def test_the_comparison_sees_a_tie_that_was_forgotten() -> None:
    case, configuration = load("gpt2"), CONFIGURATIONS["bf"]
    model = build(case)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with rrfp.local(stages_of(case, model), **configuration.options(case)).blocking() as pipe:
        actual = train(case, pipe, configuration, model, model.transformer)
    assert errors(actual, expected("gpt2"))[0] > 0.01
