"""``plan=`` of `rrfp.Pipeline`, `rrfp.local` and `rrfp.split`: what a plan decides, and models that it is not for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.ranks import ThreadedRanks
from torch import Tensor, nn

import rrfp
from rrfp.errors import ConfigError
from rrfp.lab.planning.layers import read_layers
from rrfp.pipeline.plan_file import Plan

LAYERS = 8


def document(**change: Any) -> dict[str, Any]:
    plain = {
        **{"stages": 2, "chunks": 2, "placement": "v", "hint": "bf", "limit": "n", "split": True},
        **{"cuts": [1, 3, 6], "layers": LAYERS, "recompute": [], **change},
    }
    return {"plan": plain, "rows": []}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS)))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def test_a_split_by_a_plan_has_its_cut_and_its_pipeline_the_rest(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(document()))
    stages = rrfp.split(model(), plan=tmp_path / "plan.json")
    assert stages.cuts == (1, 3, 6)
    assert [stage.layers for stage in stages] == [(range(1), range(6, 8)), (range(1, 3), range(3, 6))]
    inputs = [torch.randn(2, 4) for _ in range(4)]
    with stages.local(loss_fn=loss_fn, seed=0) as pipe:
        result = pipe.step(inputs, inputs)
        assert pipe._session.ranks.options.hint == "bf"
        assert pipe._session.ranks.options.limit == "n"
    assert result.peak_held[0] <= 4
    whole, reference = model(), []
    for each in inputs:
        loss = loss_fn(whole(each), each)
        reference.append(loss.item())
    assert result.loss == pytest.approx(sum(reference) / 4)


def test_a_plan_without_cuts_goes_with_modules_of_ones_own() -> None:
    plan = document(chunks=1, placement="looped", cuts=None, layers=None, split=False)
    with rrfp.local([nn.Linear(4, 4), nn.Linear(4, 4)], loss_fn=loss_fn, plan=plan) as pipe:
        assert pipe.step([torch.ones(1, 4)], [torch.ones(1, 4)]).loss is not None


def test_ranks_whose_plans_cut_the_model_differently_do_not_start() -> None:
    plans = [document(chunks=1, placement="looped", cuts=[cut], split=False) for cut in (3, 4)]
    own = {rank: {"plan": plan} for rank, plan in enumerate(plans)}
    outcomes = ThreadedRanks([nn.Linear(4, 4), nn.Linear(4, 4)], lambda *_: None, own).join()
    for outcome in outcomes:
        assert "partition" in str(outcome.error)
        assert "8 layers, cut at [3]" in str(outcome.error)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"stages": 3, "cuts": None, "layers": None}, {}, "plan is for 3 stages, must be for 2, as the pipeline has"),
        ({"chunks": 1, "cuts": [4]}, {}, "chunks is 1, but modules have 2 a stage"),
        ({}, {"hint": "bfw"}, "hint is 'bfw' beside a plan with 'bf': must not be passed"),
        ({}, {"placement": "looped"}, "placement is 'looped' beside a plan with 'v': must not be passed"),
        ({}, {"strict": "1f1b"}, "strict runs a schedule to the letter: it goes with neither hint nor limit"),
        ({"hint": "none"}, {}, "plan: hint is 'none', must be one of"),
        ({"limit": "all"}, {}, "plan: limit is 'all', must be a number of microbatches"),
        ({"limit": {"bytes": 5}}, {}, "plan: limit.microbatches is absent"),
        ({"cuts": [3, 1, 6]}, {}, "plan: cuts is [3, 1, 6], must be 3 ascending numbers in 1..7"),
        ({"cuts": None}, {}, "plan: cuts and layers must both be given, or None"),
        ({"recompute": [2]}, {}, "plan: recompute is [2], must be stages in 0..1"),
        ({"recompute": 1}, {}, "plan: recompute is 1, must be a list of stage numbers"),
        ({"split": 1}, {}, "plan: split is 1, must be True or False"),
        ({"depth": 1}, {}, "plan: 'depth' is unknown, must be one of: stages"),
    ],
)
def test_what_a_pipeline_refuses(change: dict[str, Any], options: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        rrfp.local([[nn.Linear(4, 4)] * 2] * 2, loss_fn=loss_fn, plan=document(**change), **options)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[]", "has no object 'plan'"), (None, "cannot be read (No such file")]
)
def test_a_file_that_is_no_plan_is_refused_by_its_name(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError) as refused:
        rrfp.Pipeline(nn.Linear(4, 4), topology=rrfp.Topology(0, 2), plan=tmp_path / "plan.json")
    assert str(refused.value).startswith(f"plan: {tmp_path / 'plan.json'}: ")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"plan": document(layers=9)}, "plan is for a model of 9 layers, must be for 8, as this one has"),
        ({"plan": document(), "stages": 2}, "stages is 2 beside a plan, which has it: must not be passed"),
        ({"plan": document(), "cuts": "times"}, "cuts is 'times' beside a plan, which has it: must not be passed"),
        (
            {"plan": document(placement="looped"), "placement": "v"},
            "placement is 'v' beside a plan, which has it: must not be passed",
        ),
        ({}, "stages is None, must be a whole number >= 1"),
        (
            {"stages": 2, "measure": True},
            "sample is missing, must be a tiny batch of inputs of this model: measure=True",
        ),
    ],
)
def test_what_a_split_refuses(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        rrfp.split(model(), **arguments)
    assert message in str(refused.value)


def test_stages_that_are_cut_otherwise_are_refused() -> None:
    stages = rrfp.split(model(), 2, cuts=[1, 4, 6], placement="v")
    message = r"plan has the layers 1..2 and 3..5 on stage 1, and the split has 1..3 and 4..5 there"
    with pytest.raises(ConfigError, match=message):
        stages.local(plan=document(), loss_fn=loss_fn)
    with pytest.raises(ConfigError, match=message):
        stages[1].pipeline(rrfp.Topology(1, 2), plan=document(), loss_fn=loss_fn)


def test_measured_layers_are_written_for_rrfp_plan(tmp_path: Path) -> None:
    layers = [nn.Linear(64, 64) for _ in range(4)] + [nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))]
    stages = rrfp.split(nn.Sequential(*layers), 2, measure=True, sample=torch.randn(32, 64))
    stages.save_layers(tmp_path / "layers.json")
    read = read_layers(tmp_path / "layers.json")
    assert (read.layout.cuts, read.layout.where.stages, read.count) == (stages.cuts, 2, 5)
    assert read.names[1:-1] == tuple((f"{n}",) for n in range(5))
    assert read.forward[5] > 2 * read.forward[2] > 0
    assert read.backward[5] > 2 * read.backward[2] > 0
    assert read.num_bytes[5] == 12 * read.num_bytes[2] == 12 * 32 * 64 * 4
    assert read.num_bytes[0] == read.num_bytes[-1] == 0
    with pytest.raises(ConfigError, match="nothing was measured"):
        rrfp.split(nn.Sequential(*layers), 2).save_layers(tmp_path / "layers.json")


def test_plain_data_reads_back() -> None:
    for limit in ("2n", 5, rrfp.Limit(3, bytes=100)):
        plan = Plan(2, 2, "v", "bf", limit, True, (1, 3, 6), LAYERS)
        assert Plan.read({"plan": json.loads(json.dumps(plan.to_plain()))}) == plan
