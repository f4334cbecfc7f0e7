"""Checkpoints of a whole model load into its stages, and theirs make one that ``from_pretrained`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import long
from integrations.decoders import FAMILIES, build, draw, loaded

import rrfp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def zeroed(family: str) -> Any:
    model = build(family, tie_word_embeddings=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def assert_same_values(actual: Any, wanted: Any) -> None:
    """All parameters and buffers of two models, those too that no checkpoint has, are the same to the bit."""
    for named in ("named_parameters", "named_buffers"):
        values, others = (dict(getattr(model, named)(remove_duplicate=False)) for model in (actual, wanted))
        assert values.keys() == others.keys()
        assert [name for name, value in values.items() if not torch.equal(value, others[name])] == []


@pytest.mark.parametrize("family", [name if name in ("gpt2", "llama") else long(name) for name in FAMILIES])
def test_stages_load_a_saved_model_and_their_states_are_saved_as_one(family: str, tmp_path: Path) -> None:
    """As under torchrun: each stage is cut out of a model of its own. The heads are tied."""
    whole, inputs = build(family, tie_word_embeddings=True), draw(1).inputs[0]
    saved, states = whole.state_dict(), []
    for index in range(3):
        stage = rrfp.split(zeroed(family), 3)[index]
        stage.load_state_dict(saved)
        states.append(stage.state_dict())
    merged = rrfp.merge_state_dict(states)
    assert merged.keys() == saved.keys()
    whole.save_pretrained(tmp_path / "whole")
    zeroed(family).save_pretrained(tmp_path / "merged", state_dict=merged)
    wanted, actual = (loaded(tmp_path / name).eval() for name in ("whole", "merged"))
    assert_same_values(actual, wanted)
    logits = wanted(**inputs).logits
    assert logits.isfinite().all()
    # Loaded parameters lie where their file has them, and sums of products round by how their memory is aligned.
    torch.testing.assert_close(actual(**inputs).logits, logits, rtol=1e-12, atol=1e-12)
