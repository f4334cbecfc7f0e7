"""The families of docs/reference/api.md, as tiny random models: split, trained for a step, loaded by stages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from installed import ROOT
from integrations.decoders import Trained, build, differing, draw, loaded, skeleton, take_gradients, train_whole
from torch import Tensor, nn

import rrfp

PAGE = (ROOT / "docs" / "reference" / "api.md").read_text()
LISTED = re.search(r"^- \*\*All families.*?(?=^- \*\*)", PAGE, re.MULTILINE | re.DOTALL)
assert LISTED is not None
FAMILIES = re.findall(r"`([a-z0-9_]+)`", LISTED[0].partition(":")[2].partition("Refused")[0])
REFUSED = re.findall(r"`([a-z0-9_]+)`", LISTED[0].partition("Refused")[2])

#: For all, most of which know some of them.
SMALL: dict[str, Any] = {
    "attention_dropout": 0.0,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
}

LATENT: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "kv_lora_rank": 16,
    "n_group": 1,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "topk_group": 1,
    "v_head_dim": 8,
}

INDEXED: dict[str, Any] = {**LATENT, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4}

BY_LAYER: dict[str, Any] = {
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 64,
}

#: What a family needs besides, or in place of that.
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3"), LATENT),
    **dict.fromkeys(("glm4_moe_lite", "minicpm3", "youtu"), LATENT),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), INDEXED),
    "dots1": {"first_k_dense_replace": 1, "n_group": 1, "n_shared_experts": 1, "topk_group": 1},
    "gemma3n_text": {
        **BY_LAYER,
        "altup_num_inputs": 2,
        "laurel_rank": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": BY_LAYER,
    "gpt2": {},
    "seed_oss": {"residual_dropout": 0.0},
}


def settings(family: str) -> dict[str, Any]:
    own = {**SMALL, **OWN.get(family, {})}
    if family in OWN and OWN[family].get("q_lora_rank"):
        del own["head_dim"]
    return own


def values(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


def test_the_page_lists_forty_families_and_more() -> None:
    assert len(FAMILIES) == len(set(FAMILIES)) >= 40
    assert not {*FAMILIES} & {*REFUSED}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_train_as_the_whole_and_have_the_values_of_a_folder(family: str, tmp_path: Path) -> None:
    """To the bit, over ragged and padded microbatches; each stage is loaded into a skeleton of its own."""
    model, batch = build(family, **settings(family)), draw()
    wanted = train_whole(model, batch, use_cache=False)
    with rrfp.split(model, 3).local(deterministic=True).blocking() as pipe:
        result = pipe.step(batch.inputs, batch.labels, weights=batch.weights)
    assert differing(Trained(list(result.losses), take_gradients(model)), wanted) == []

    model.save_pretrained(tmp_path)
    wanted_values = {**values(loaded(tmp_path)), **model.state_dict()}  # buffers that no folder has, and what it has
    found = set[str]()
    for index in range(3):
        stage = rrfp.split(skeleton(family, **settings(family)), 3, check=False)[index]
        stage.load_pretrained(tmp_path)
        for name, value in (item for chunk in stage.chunks for item in values(chunk).items()):
            assert torch.equal(value, wanted_values[name].to(value.dtype)), name
            found.add(name)
    assert found == wanted_values.keys()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", REFUSED)
def test_families_that_no_rule_fits_are_refused(family: str) -> None:
    with pytest.raises(rrfp.ConfigError, match=r"^model is a \w+ (with|without|whose) "):
        rrfp.split(build(family, **settings(family)), 3)
