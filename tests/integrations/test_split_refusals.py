"""Models and inputs that `rrfp.split` cannot handle are refused: no gradient is wrong without an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integrations.decoders import build, config, draw
from torch import nn

import rrfp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}


def refusal(model: Any, **arguments: Any) -> str:
    with pytest.raises(rrfp.ConfigError) as refused:
        rrfp.split(model, 2, **arguments)
    return str(refused.value)


def test_a_family_without_a_plan() -> None:
    from transformers import BertConfig, BertModel

    message = refusal(BertModel(BertConfig(**TINY)))
    assert message.startswith("model is a BertModel without a base_model_pp_plan for one chain of layers: must be a")
    assert message.endswith("GPT-2, an nn.Sequential or a list of blocks")


def test_an_encoder_with_a_decoder() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64))
    assert refusal(model).startswith("model is a T5ForConditionalGeneration without a base_model_pp_plan")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_head_that_no_part_has(family: str) -> None:
    from transformers import AutoModelForSequenceClassification

    message = refusal(AutoModelForSequenceClassification.from_config(config(family)))
    assert "with parameters outside of its layers and its pp_plan: score.weight; must be" in message


def test_a_single_layer_of_a_model() -> None:
    assert refusal(build("llama").model.layers[0]).startswith("model is a LlamaDecoderLayer, must be a model of")


def test_a_model_that_transformers_has_cut_by_itself() -> None:
    from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

    model = build("llama")
    for index in (2, 3):
        model.model.layers[index] = PipelineIdentityLayer()
    message = refusal(model, check=False)
    assert message.startswith("model is a LlamaForCausalLM without its layers [2, 3], must have all: load it without")


def test_a_plan_whose_layers_need_more() -> None:
    model = build("llama")
    plan = dict(model.config.base_model_pp_plan)
    model.config.base_model_pp_plan = plan | {"layers": (["hidden_states", "memory"], ["hidden_states"])}
    message = refusal(model)
    assert "base_model_pp_plan['layers'] of a LlamaForCausalLM is (['hidden_states', 'memory']" in message
    assert message.endswith("must take attention_mask and hidden_states alone and return hidden_states")


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"rope_parameters": DYNAMIC}),
        (
            "gemma3_text",
            {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "rope_parameters": {
                    "full_attention": DYNAMIC,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            },
        ),
    ],
)
def test_rotary_frequencies_that_depend_on_earlier_microbatches(family: str, settings: dict[str, Any]) -> None:
    message = refusal(build(family, **settings), check=False)
    assert message.startswith("rope_type is 'dynamic' in model.rotary_emb of a ")
    assert message.endswith(
        "longer than max_position_embeddings (32), a model that is built with 'default' has the same"
    )


def test_such_frequencies_in_stages_cut_by_hand_are_refused_where_runs_must_repeat() -> None:
    """Of the rotary embeddings that write their tables, `deterministic=True` refuses only those that keep them."""
    rotary = build("llama", rope_parameters=DYNAMIC).model.rotary_emb

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary, self.layer = rotary, nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cos, _ = self.rotary(x, torch.arange(x.shape[1])[None])
            output: torch.Tensor = self.layer(x * cos)
            return output

    inputs = [torch.randn(1, length, 8) for length in (40, 48)]
    with (
        pytest.raises(rrfp.PipelineAborted, match=r"its buffer 'rotary\.inv_freq'"),
        rrfp.local([Positions()], loss_fn=lambda y, _: y.sum(), deterministic=True).blocking() as pipe,
    ):
        pipe.step(inputs, [None] * 2)


@pytest.mark.parametrize("field", ["output_hidden_states", "output_attentions"])
def test_a_model_that_returns_what_its_layers_return(field: str) -> None:
    model = build("llama", attn_implementation="eager")
    setattr(model.config, field, True)
    assert refusal(model) == f"config.{field} is True, must be False: the parts return no layer's own outputs"


def test_a_wrapper_of_peft() -> None:
    class Wrapper(nn.Module):
        def get_base_model(self) -> nn.Module:
            return nn.Identity()

    assert refusal(Wrapper()).endswith("an nn.Sequential or a list of modules: pass model.get_base_model()")


def scaled(model: Any) -> Any:
    """The model, whose forward scales the embeddings by itself, as that of several families does."""

    class Scaled(type(model.model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **options: Any) -> Any:
            hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            return super().forward(inputs_embeds=1.5 * hidden, **options)

    model.model.__class__ = Scaled
    return model


def test_a_forward_that_does_more_than_its_plan_says_is_found_by_the_check() -> None:
    message = refusal(scaled(build("llama")), check=True)
    assert message.startswith("model is a LlamaForCausalLM whose parts do not compute what the whole computes: the ")
    assert " of its largest entry; it must be cut by hand" in message


def test_the_check_names_the_parameter_whose_gradient_deviates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that passes hidden states on without their history has right outputs."""
    part: Any = type(rrfp.split(build("llama"), 2)[0].chunks[0])
    forward = part.forward

    def detached(self: Any, *arguments: Any, **options: Any) -> Any:
        output = forward(self, *arguments, **options)
        return (output[0].detach(), *output[1:]) if isinstance(output, tuple) else output

    monkeypatch.setattr(part, "forward", detached)
    message = refusal(build("llama"), check=True)
    assert "the gradient of model.embed_tokens.weight deviates by all of it: the parts have none;" in message


def test_families_and_classes_that_no_test_covers_are_checked_by_default() -> None:
    """Granite scales its embeddings in its forward; a subclass may do anything."""
    from transformers import GraniteConfig, GraniteForCausalLM

    granite = GraniteForCausalLM(GraniteConfig(**TINY, embedding_multiplier=2.0))
    for model in (granite, scaled(build("llama"))):
        assert "do not compute what the whole computes" in refusal(model)
        rrfp.split(model, 2, check=False)
    granite.config.embedding_multiplier = granite.model.embedding_multiplier = 1.0
    rrfp.split(granite, 2)


def test_a_loss_that_is_not_the_models_is_found_by_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    loss_class = type(rrfp.split(build("llama"), 2).loss_fn)
    monkeypatch.setattr(loss_class, "__call__", lambda loss, output, labels: output.logits.sum())
    assert "the loss deviates by" in refusal(build("llama").requires_grad_(False), check=True)


def test_parts_that_do_not_run_are_found_by_the_check() -> None:
    """A layer that needs what only the whole model passes on, as some that share keys and values."""
    model = build("llama")

    class Keeping(type(model.model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, **options: Any) -> Any:
            shared = {} if input_ids is None else {"shared": 1}
            return super().forward(input_ids, **options, **shared)

    def needs_it(layer: nn.Module, inputs: Any, options: dict[str, Any]) -> None:
        options["shared"]

    model.model.__class__ = Keeping
    model.model.layers[-1].register_forward_pre_hook(needs_it, with_kwargs=True)
    message = refusal(model)
    assert "model is a LlamaForCausalLM whose parts do not run one after the other (KeyError: 'shared');" in message


def test_a_model_without_weights_is_neither_checked_nor_measured() -> None:
    with torch.device("meta"):
        model = build("llama")
    assert refusal(model, check=True) == "model is on the meta device, must have weights: check=True needs them"
    assert refusal(model, cuts="times") == "model is on the meta device, must have weights: cuts='times' needs them"
    assert rrfp.split(model, 2).cuts == (2,)


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "qwen3_moe"])
def test_a_check_that_passes_leaves_no_trace(family: str) -> None:
    model = build(family)
    state = torch.get_rng_state()
    rrfp.split(model, 2, check=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())


def test_a_model_with_frozen_parameters_is_checked_too() -> None:
    model = build("llama").requires_grad_(False)
    rrfp.split(model, 2, check=True)
    model.lm_head.requires_grad_(True)
    rrfp.split(model, 2, check=True)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"labels": torch.zeros(1, 4).long()}, "labels are given with the inputs, must be the targets of the step"),
        ({"use_cache": True}, "a part of a LlamaForCausalLM is given 'use_cache', must be one of: attention_mask, "),
        (
            {"inputs_embeds": torch.zeros(1, 4, 32)},
            "must have one of input_ids, as a tensor or by keyword, and inputs_embeds",
        ),
        ({"past_key_values": None}, "is given 'past_key_values', must be one of: attention_mask, input_ids, "),
    ],
)
def test_inputs_that_no_part_takes(inputs: dict[str, Any], message: str) -> None:
    batch = draw(1)
    with (
        pytest.raises(rrfp.PipelineAborted, match=message),
        rrfp.split(build("llama"), 2).local().blocking() as pipe,
    ):
        pipe.step([{**batch.inputs[0], **inputs}], batch.labels)


def test_labels_that_are_left_in_the_inputs() -> None:
    batch = draw(2)
    inputs = [{**each, "labels": labels} for each, labels in zip(batch.inputs, batch.labels, strict=True)]
    wanted = "targets is missing, must be a list of 2 on the rank that computes the loss, one for each microbatch; "
    with rrfp.split(build("llama"), 2).local().blocking() as pipe:
        with pytest.raises(rrfp.ConfigError) as refused:
            pipe.step(inputs)
        assert str(refused.value).endswith(f"{wanted}the labels are in the inputs")
        with pytest.raises(rrfp.ConfigError) as refused:
            pipe.step(batch.inputs)
        assert str(refused.value).endswith(wanted.removesuffix("; "))


def test_a_mask_is_no_positional_argument() -> None:
    """The second argument of GPT-2 is another than that of Llama."""
    batch = draw(1)
    with (
        pytest.raises(rrfp.PipelineAborted, match="inputs have 2 positional arguments and the keywords"),
        rrfp.split(build("llama"), 2).local().blocking() as pipe,
    ):
        pipe.step([tuple(batch.inputs[0].values())], batch.labels)
