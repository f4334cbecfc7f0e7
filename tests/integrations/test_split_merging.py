"""`rrfp.merge_state_dict` makes a whole model, or says in one error which part is missing."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rrfp


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))


def states(**arguments: Any) -> list[Any]:
    return [stage.state_dict() for stage in rrfp.split(chain(), 4, **arguments)]


def saved(state: Any) -> Any:
    """The state, written to a file and read."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def refusal(given: Any, model: nn.Module | None = None) -> str:
    with pytest.raises(rrfp.ConfigError) as refused:
        rrfp.merge_state_dict(given, model)
    return str(refused.value)


@pytest.mark.parametrize("kept", [slice(3), slice(1, None), slice(None, None, 3)])
@pytest.mark.parametrize("through", [saved, lambda state: state])
def test_a_stage_that_is_missing_is_named(kept: slice, through: Callable[[Any], Any]) -> None:
    given = list(map(through, states()))
    missing = min({*range(4)} - {*range(4)[kept]})
    assert refusal(given[kept]) == f"states lack stage {missing}, must have all stages of the model, 0..3"
    assert list(rrfp.merge_state_dict(iter(given))) == list(chain().state_dict())


def test_stages_of_replicas_may_be_there_twice() -> None:
    given = states()
    assert rrfp.merge_state_dict([*given, *given]).keys() == chain().state_dict().keys()


def test_parts_of_several_splits_are_refused() -> None:
    model = chain()
    first, last = rrfp.split(model, 2, cuts=[1])[0].state_dict(), rrfp.split(model, 2, cuts=[3])[1].state_dict()
    text = "states are of 'Sequential of 4 layers, cut at [1], 2 stages' and of 'Sequential of 4 layers, cut at [3], "
    assert refusal([first, last]) == f"{text}2 stages', must be of one split"


def test_names_are_compared_with_a_model() -> None:
    """Plain dicts, as other formats give them, do not say which stages they are."""
    given = [dict(state) for state in states()]
    with torch.device("meta"):
        model = chain()
    wanted = ", must have all entries of model and no others"
    assert refusal(given[:3], model) == f"states lack '3.bias'{wanted}"
    assert refusal(given, model[:3]) == f"states have '3.bias', which model lacks{wanted}"
    assert rrfp.merge_state_dict(given, model).keys() == model.state_dict().keys()
    assert rrfp.merge_state_dict(given[:3]).keys() == model[:3].state_dict().keys()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("stage0.pt", "states is a str"),
        ({"0.weight": torch.zeros(1)}, "states is a dict"),
        (None, "states is a NoneType"),
        ([], "states is empty"),
    ],
)
def test_states_that_are_no_list(given: Any, text: str) -> None:
    assert refusal(given) == f"{text}, must be a list of state dicts, one of each stage"


def test_paths_instead_of_states() -> None:
    wanted = "must be a list of state dicts, one of each stage: load files first"
    assert refusal(["stage0.pt", "stage1.pt"]) == f"states[0] is a str, {wanted}"


def test_a_stages_state_keeps_the_versions_of_its_modules() -> None:
    (stage,) = rrfp.split([nn.BatchNorm1d(2)], 1)
    assert stage.state_dict()._metadata["0"] == {"version": 2}  # type: ignore[attr-defined]
    nn.Sequential(nn.BatchNorm1d(2)).load_state_dict(stage.state_dict())
