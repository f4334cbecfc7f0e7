"""The state of a pipeline: small plain data, from which another pipeline goes on with the same bits."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch
from runtime.ranks import ThreadedRanks
from runtime.toys import data, loss_fn, placed, same_bits, stages
from torch import Tensor, nn

import rrfp
from rrfp.errors import ConfigError, RrfpError
from rrfp.hints import Hint, ReadySet, View
from rrfp.memory.measured import Largest
from rrfp.memory.seen_sizes import REMEMBERED_STEPS, SeenSizes
from rrfp.pipeline.faces import BlockingPipeline

BATCH = data(4)


def pipeline(modules: list[Any], **options: Any) -> Any:
    return rrfp.local(modules, **{"loss_fn": loss_fn, "deterministic": True, **options})


def train(pipe: BlockingPipeline, steps: int) -> list[float | None]:
    return [pipe.step(BATCH.inputs, BATCH.targets).loss for _ in range(steps)]


def state_after(steps: int, **options: Any) -> Any:
    with pipeline(stages(2), **options).blocking() as pipe:
        train(pipe, steps)
        return pipe.state_dict()


@pytest.mark.parametrize("carried", [lambda s: json.loads(json.dumps(s)), lambda s: msgpack.unpackb(msgpack.packb(s))])
def test_a_run_goes_on_from_its_state_with_the_same_bits(carried: Callable[[Any], Any]) -> None:
    whole, resumed = stages(2), stages(2)
    with pipeline(list(whole)).blocking() as pipe:
        losses = train(pipe, 4)
    first = pipeline(list(resumed))
    with first.blocking() as pipe:
        before = train(pipe, 2)
        pipe.evaluate(BATCH.inputs, BATCH.targets)
        inside = pipe.state_dict()
    state = first.state_dict()
    assert state == inside == carried(state)
    second = pipeline(list(resumed))
    second.load_state_dict(carried(state))
    assert second.state_dict() == state
    with second.blocking() as pipe:
        assert [*before, *train(pipe, 2)] == losses
        assert pipe.state_dict()["step"] == 4
    assert same_bits(whole, resumed)


def test_the_state_has_the_step_and_the_method_by_name() -> None:
    state = state_after(3, seed=5, limit=3)
    measured = state.pop("measured")
    assert state == {
        "version": 1,
        "step": 3,
        "seed": 5,
        "hint": "slot-aware-pyramid",
        "limit": "3",
        "strict": None,
        "deterministic": True,
        "virtual_stages": 2,
        "stage": 0,
        "replica": 0,
        "names": [],
        "order": "free",
    }
    assert [each["virtual_stage"] for each in measured] == [0, 1]
    for each in measured:
        assert [(spent["kind"], spent["count"]) for spent in each["durations"]] == [("B", 12), ("F", 12)]
    assert pipeline(stages(2), strict="1f1b").state_dict()["hint"] is None
    assert pipeline(stages(2), strict="1f1b").state_dict()["strict"] == "1f1b"


def test_a_state_is_loaded_between_steps_too() -> None:
    with pipeline(stages(2)).blocking() as pipe:
        start = pipe.state_dict()
        losses = train(pipe, 3)
        pipe.load_state_dict({**start, "step": 1})
        assert train(pipe, 2) == losses[1:]


def test_during_a_step_both_are_refused() -> None:
    refused: list[str] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        for call in (pipe.state_dict, lambda: pipe.load_state_dict(start)):
            with pytest.raises(RrfpError) as caught:
                call()
            refused.append(str(caught.value))
        return loss_fn(output, target)

    with pipeline(stages(2), loss_fn=loss).blocking() as pipe:
        start = pipe.state_dict()
        train(pipe, 1)
    assert set(refused) == {
        "state_dict goes between steps: this pipeline is in a step",
        "load_state_dict goes between steps: this pipeline is in a step",
    }
    with pytest.raises(RrfpError, match="this pipeline is closed: load the state into a new one"):
        pipe.load_state_dict(start)


def test_a_step_that_failed_does_not_count() -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                return super().forward(x)
            raise ValueError("fails")

    module = Failing(6, 6).double()

    def run(pipe: BlockingPipeline) -> None:
        with pipe:
            train(pipe, 2)
            module.eval()
            train(pipe, 1)

    pipe = pipeline([module]).blocking()
    with pytest.raises(rrfp.PipelineAborted):
        run(pipe)
    assert pipe.state_dict()["step"] == 2


DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "hint": ({"hint": "bf"}, "saved with hint slot-aware-pyramid, this pipeline has bf: the order of tasks changes"),
    "limit": ({"limit": "n"}, "saved with limit 2n, this pipeline has n: the memory held and the order of tasks"),
    "deterministic": ({"deterministic": False}, "saved with deterministic True, this pipeline has False: the order"),
}


@pytest.mark.parametrize("field", DIFFERENCES)
def test_a_run_that_goes_on_otherwise_is_warned(field: str, caplog: pytest.LogCaptureFixture) -> None:
    options, text = DIFFERENCES[field]
    state = state_after(1)
    caplog.set_level(logging.WARNING)
    other = pipeline(stages(2), **options)
    other.load_state_dict(state)
    (warning,) = caplog.messages
    assert text in warning
    assert other.state_dict()["step"] == 1


def test_another_cut_warns_and_drops_what_was_measured(caplog: pytest.LogCaptureFixture) -> None:
    other = pipeline(stages(3))
    other.load_state_dict(state_after(1))
    (warning,) = caplog.messages
    assert "saved with virtual_stages 2, this pipeline has 3: dropout draws other numbers" in warning
    assert other.state_dict()["measured"] == []


def test_a_run_that_follows_torchs_seed_goes_on_where_torch_is_seeded_alike() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2**64 - 1)
        state = json.loads(json.dumps(pipeline(stages(2), seed=None).state_dict()))
        assert state["seed"] == 2**64 - 1
        pipeline(stages(2), seed=None).load_state_dict(state)
        torch.manual_seed(1)
        pipeline(stages(2), seed=state["seed"]).load_state_dict(state)
        with pytest.raises(ConfigError, match=f"seed is 1, must be {2**64 - 1}, as in the state"):
            pipeline(stages(2), seed=None).load_state_dict(state)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def measured(seconds: float) -> dict[str, Any]:
    spent = {"kind": "F", "count": 1, "seconds": seconds}
    return {"virtual_stage": 0, "durations": [spent], "training_sizes": [], "evaluation_sizes": []}


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "seed": ({"seed": 1}, {}, "seed is 1, must be 0, as in the state"),
    "first_step": ({"first_step": 2}, {}, "first_step is 2, must be 1, the state's step, or not passed"),
    "version": ({}, {"version": 9}, "state: version is 9, must be 1"),
    "type": ({}, {"step": "1"}, "state cannot be read: '1' is no int"),
    "deep": ({}, {"version": nested(1000)}, "state: version is [[[[[["),
    "finite": ({}, {"measured": [measured(math.nan)]}, "state: seconds is nan, must be at least 0 and finite"),
    "least": ({}, {"step": -1}, "state: step is -1, must be at least 0"),
    "most": ({}, {"step": 2**63}, "state: step is 9223372036854775808, must be at least 0 and finite"),
    "tensor": ({}, {"version": torch.ones(2)}, "state: version is tensor([1., 1.]), must be 1"),
    "unknown": ({}, {"steps": 1}, "is no record of version, step"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(name: str) -> None:
    options, changes, text = REFUSED[name]
    other = pipeline(stages(2), **options)
    before = other.state_dict()
    with pytest.raises(ConfigError) as caught:
        other.load_state_dict({**state_after(1), **changes})
    assert text in str(caught.value)
    assert other.state_dict() == before


@pytest.mark.parametrize("state", [None, [], {}, {"model": 1}])
def test_something_else_is_refused(state: Any) -> None:
    with pytest.raises(ConfigError, match="must be a dict that state_dict\\(\\) returned"):
        pipeline(stages(2)).load_state_dict(state)


def test_hints_see_the_durations_of_the_run_before_on_every_placement() -> None:
    state, seen = state_after(1), {}
    for each in state["measured"]:
        for spent in each["durations"]:
            spent |= {"count": 2, "seconds": 20.0 * (1 + each["virtual_stage"])}

    class Reads(Hint):
        def choose(self, ready: ReadySet, view: View) -> rrfp.Task | None:
            return next(iter(ready))

        def open_step(self, view: View) -> None:
            for chunk, v in enumerate(view.graph.placement.virtual_stages(view.stage)):
                seen[v] = view.mean_seconds(rrfp.Kind.F, chunk)

    for modules, placement in ((stages(2), "looped"), (placed(stages(2), 1, "v"), "v")):
        seen.clear()
        other = pipeline(list(modules), placement=placement, hint=Reads)
        other.load_state_dict(state)
        with other.blocking() as pipe:
            train(pipe, 1)
        assert seen == {0: 10.0, 1: 20.0}


def test_a_limit_on_bytes_expects_the_sizes_of_the_run_before_and_forgets_them_as_soon() -> None:
    seen = SeenSizes(2)
    for number in range(3):
        seen.open_step()
        seen.saw(0, 100 - number)
        seen.saw_growth(1, 10, 15)
    again = SeenSizes(2)
    again.restore([seen.of(0), seen.of(1)])
    assert [again.of(chunk) for chunk in (0, 1)] == [seen.of(chunk) for chunk in (0, 1)]
    for _ in range(REMEMBERED_STEPS + 1):
        assert again.open_step().expected == seen.open_step().expected
    assert again.expected == [Largest(), Largest()]


def test_a_limit_on_bytes_is_in_the_state() -> None:
    state = state_after(1, limit=rrfp.Limit(bytes=10**6))
    assert state["limit"] == "Limit(microbatches=None, bytes=1000000, rule='staircase')"
    sizes = [each["training_sizes"] for each in state["measured"]]
    assert all(len(steps) == 1 and steps[0]["held"] > 0 for steps in sizes)


def test_ranks_that_load_states_of_other_steps_are_refused_when_they_enter() -> None:
    state = state_after(1)

    def body(stage: int, pipe: BlockingPipeline) -> None:
        pipe.load_state_dict({**state, "step": 1 + stage})
        train(pipe, 1)

    outcomes = ThreadedRanks(list(stages(2)), body, deterministic=True).join()
    for outcome in outcomes:
        assert "the training step is 1 on stage 0 and 2 on stage 1: must be the same" in str(outcome.abort)
