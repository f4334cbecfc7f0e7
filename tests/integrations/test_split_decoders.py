"""`rrfp.split` of transformers' decoders: losses and gradients of the whole model, to the bit."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from batches import long
from integrations.decoders import (
    FAMILIES,
    LAYERS,
    ROUTED,
    Batch,
    Trained,
    build,
    differing,
    draw,
    draw_packed,
    take_gradients,
    train_whole,
)
from torch import nn

import rrfp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]  # to import transformers takes seconds


class LastFirst(rrfp.Hint):
    """Forwards in the reverse of the order of a plain loop."""

    def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task | None:
        return max(ready, key=lambda task: (task.kind is rrfp.Kind.F, task.microbatch))


def train_parts(model: nn.Module, parts: Any, batch: Batch, **options: Any) -> Trained:
    """A step of all stages in this process."""
    with parts.local(deterministic=True, **options).blocking() as pipe:
        result = pipe.step(batch.inputs, batch.labels, weights=batch.weights)
    return Trained(list(result.losses), take_gradients(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_the_whole_models_to_the_bit(family: str) -> None:
    """Over ragged, padded microbatches, whose token counts weigh their means; routers add their auxiliary loss."""
    model, batch = build(family, **({"output_router_logits": True} if family in ROUTED else {})), draw()
    wanted = train_whole(model, batch)
    parts = rrfp.split(model, 3)
    assert [name for stage in parts for name in stage.ties] == []
    assert differing(train_parts(model, parts, batch), wanted) == []


@pytest.mark.parametrize("family", ["llama", "gpt2", *map(long, ("gemma2", "qwen3_moe"))])
def test_a_tied_head_has_the_sum_of_both_gradients(family: str) -> None:
    """That one sum is rounded otherwise than in a plain loop, which adds both in each microbatch."""
    model, batch = build(family, tie_word_embeddings=True), draw()
    wanted = train_whole(model, batch)
    parts = rrfp.split(model, 2)
    embedding = model.get_input_embeddings().weight
    (name,) = parts[0].ties
    assert parts[0].ties[name] is parts[1].ties[name] is embedding
    actual = train_parts(model, parts, batch)
    assert differing(actual, wanted) == [name]
    torch.testing.assert_close(actual.gradients[name], wanted.gradients[name], rtol=1e-12, atol=1e-14)


def test_copies_of_a_tied_head_in_two_processes_get_the_same_gradient() -> None:
    """As under torchrun, where each stage is cut out of a model of its own."""
    batch, models = draw(), [build("llama", tie_word_embeddings=True) for _ in range(2)]
    wanted = train_whole(models[0], batch)
    first, last = (rrfp.split(model, 2)[index] for index, model in enumerate(models))
    stages, ties = [first.chunks, last.chunks], [first.ties, last.ties]
    with rrfp.local(stages, ties=ties, loss_fn=last.loss_fn, deterministic=True).blocking() as pipe:
        result = pipe.step(batch.inputs, batch.labels, weights=batch.weights)
    gradients = [take_gradients(*stage) for stage in stages]
    name, copy_of_head = "model.embed_tokens.weight", gradients[1].pop("lm_head.weight")
    assert torch.equal(gradients[0][name], copy_of_head)
    actual = Trained(list(result.losses), gradients[0] | gradients[1])
    assert differing(actual, wanted) == [name]
    torch.testing.assert_close(copy_of_head, wanted.gradients[name], rtol=1e-12, atol=1e-14)


def test_without_the_auxiliary_loss_of_the_other_parts_gradients_differ() -> None:
    """The comparison sees what the routers' logits carry from part to part."""
    batch = draw()
    with_loss, without = (build("mixtral", output_router_logits=wanted) for wanted in (True, False))
    names = differing(train_parts(without, rrfp.split(without, 2), batch), train_whole(with_loss, batch))
    assert any("layers.0" in name for name in names)


@pytest.mark.parametrize("cuts", [[1, 2, 3], None])
def test_two_chunks_in_a_v_give_the_same(cuts: list[int] | None) -> None:
    model, batch = build("llama", tie_word_embeddings=True), draw()
    wanted = train_whole(model, batch)
    parts = rrfp.split(model, 2, cuts=cuts, placement="v")
    assert parts.cuts == (1, 2, 3)
    assert [len(stage.chunks) for stage in parts] == [2, 2]
    assert [list(stage.ties) for stage in parts] == [["model.embed_tokens.weight"], []]
    assert differing(train_parts(model, parts, batch), wanted) == ["model.embed_tokens.weight"]


def test_a_stage_can_be_the_whole_model() -> None:
    model, batch = build("mixtral", output_router_logits=True), draw(2)
    wanted = train_whole(model, batch)
    assert differing(train_parts(model, rrfp.split(model, 1), batch), wanted) == []


def test_masks_and_positions_travel_or_come_by_keyword() -> None:
    model, batch = build("llama"), draw()
    positions = [{"position_ids": 3 + torch.arange(each["input_ids"].shape[1])[None]} for each in batch.inputs]
    moved = Batch([{**each, **own} for each, own in zip(batch.inputs, positions, strict=True)], batch.labels)
    wanted = train_whole(model, moved)
    assert differing(wanted, train_whole(model, batch)) != []
    parts = rrfp.split(model, 3)
    assert differing(train_parts(model, parts, moved), wanted) == []
    tokens = [each.pop("input_ids") for each in moved.inputs]
    with parts.local(deterministic=True).blocking() as pipe:
        result = pipe.step(tokens, moved.labels, kwargs=moved.inputs, weights=moved.weights)
    assert differing(Trained(list(result.losses), take_gradients(model)), wanted) == []


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_packed_sequences_are_those_of_the_whole_model_without_a_cache(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With its default, a cache, each sequence attends to those before it in the row; the log says so once."""
    model, batch = build(family), draw_packed()
    wanted = train_whole(model, batch, use_cache=False)
    assert differing(train_whole(model, batch), wanted)[-1] == "losses"
    parts = rrfp.split(model, 2)
    for _ in range(2):
        assert differing(train_parts(model, parts, batch), wanted) == []
    (said,) = [message for message in caplog.messages if "position_ids" in message]
    assert said.startswith("position_ids begin again and there is no attention_mask: packed sequences do not attend to")
    assert "as in model(**inputs, use_cache=False)" in said


def test_one_sequence_a_row_and_packed_ones_with_a_mask_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, packed = build("llama"), draw_packed(1).inputs[0]
    shifted = {**packed, "position_ids": 3 + torch.arange(8)[None]}
    masked = {**packed, "attention_mask": torch.ones_like(packed["input_ids"])}
    with rrfp.split(model, 2).local().blocking() as pipe:
        pipe.evaluate([shifted, masked, packed["input_ids"]])
    assert not [message for message in caplog.messages if "position_ids" in message]


def test_frequencies_that_follow_the_length_alone_are_no_state(caplog: pytest.LogCaptureFixture) -> None:
    """LongRoPE writes its table in each forward, of the microbatch's own length; here two lengths need another one."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 9}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model, batch = build("phi3", rope_parameters={**rope, **factors}), draw()
    wanted = train_whole(model, batch)
    parts = rrfp.split(model, 2)
    assert differing(train_parts(model, parts, batch, hint=LastFirst), wanted) == []
    with parts.local(hint=LastFirst).blocking() as pipe:
        pipe.step(batch.inputs, batch.labels)
        pipe.evaluate(batch.inputs, batch.labels)
    assert not [message for message in caplog.messages if "wrote its buffer" in message]


def test_a_bare_decoder_returns_hidden_states() -> None:
    model, batch = build("gemma2", bare=True), draw(2)

    def loss_fn(output: Any, target: Any) -> torch.Tensor:
        loss: torch.Tensor = output.last_hidden_state.square().mean()
        return loss

    losses = [loss_fn(model(**inputs), None) for inputs in batch.inputs]
    torch.autograd.backward(torch.stack(losses).mean())
    wanted = Trained([loss.item() for loss in losses], take_gradients(model))
    parts = rrfp.split(model, 2)
    assert parts.loss_fn is None
    with parts.local(deterministic=True, loss_fn=loss_fn).blocking() as pipe:
        result = pipe.step(batch.inputs, [None] * 2)
    assert differing(Trained(list(result.losses), take_gradients(model)), wanted) == []


def test_evaluation_returns_what_the_model_returns() -> None:
    model, batch = build("gemma2").eval(), draw(2)
    parts = rrfp.split(model, 2)
    with parts.local().blocking() as pipe:
        outputs = pipe.evaluate(batch.inputs).outputs
    with torch.no_grad():
        for m, inputs in enumerate(batch.inputs):
            assert torch.equal(outputs[m]["logits"], model(**inputs).logits)


def test_parts_keep_train_and_eval_mode_of_their_own() -> None:
    model = build("gpt2", attn_pdrop=0.5)
    first, last = rrfp.split(model, 2)
    first.train(False)
    assert not any(module.training for module in first.chunks[0].modules())
    assert all(module.training for module in last.chunks[0].modules())
    assert all(module.training for module in model.modules())


def test_a_replaced_child_of_a_part_is_the_one_that_runs() -> None:
    """As peft and quantizers replace modules."""
    model, batch = build("llama"), draw(1)
    (part,) = rrfp.split(model, 1)[0].chunks
    zeros = nn.Linear(32, 64, bias=False, dtype=torch.float64)
    nn.init.zeros_(zeros.weight)
    part.lm_head = zeros
    assert not part(**batch.inputs[0]).logits.any()
    assert not copy.deepcopy(part)(**batch.inputs[0]).logits.any()
    assert model(**batch.inputs[0]).logits.any()


def test_activation_checkpointing_that_was_enabled_before_stays() -> None:
    model, batch = build("llama"), draw(2)
    wanted = train_whole(model, batch)
    model.activation_checkpointing_enable({"use_reentrant": False})
    parts = rrfp.split(model, 2)
    assert differing(train_parts(model, parts, batch), wanted) == []


@pytest.mark.parametrize("by", ["parameters", "times"])
def test_the_parts_have_every_layer_once_however_cut(by: Any) -> None:
    model = build("gpt2")
    parts = rrfp.split(model, 3, cuts=by)
    names = [name for stage in parts for name in stage.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    assert len(parts.cuts) == 2
    assert all(0 < cut < LAYERS for cut in parts.cuts)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_stage_keeps_nothing_of_the_others() -> None:
    model = build("mixtral", tie_word_embeddings=True)
    own, other = (weakref.ref(model.model.layers[index].input_layernorm.weight) for index in (0, LAYERS - 1))
    stage = rrfp.split(model, 2)[0]
    del model
    gc.collect()
    assert own() is stage.chunks[0].get_parameter("model.layers.0.input_layernorm.weight")
    assert other() is None


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_peft_are_split_with_the_layers_that_contain_them() -> None:
    from peft import LoraConfig, get_peft_model

    batch, config = draw(2), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: Any = get_peft_model(build("llama"), config).double()
    wanted = train_whole(model.get_base_model(), batch)
    assert all("lora" in name for name in wanted.gradients)
    parts = rrfp.split(model.get_base_model(), 2)
    assert differing(train_parts(model.get_base_model(), parts, batch), wanted) == []


def test_the_parts_keep_the_settings_that_the_model_had_when_it_was_split() -> None:
    model, calls = build("llama"), []
    split = rrfp.split(model, 2)
    model.eval()
    model.activation_checkpointing_enable()
    model.config.output_router_logits = True
    for module in model.modules():
        module.register_forward_hook(lambda *arguments: calls.append(arguments))
    batch = draw(1)
    with split.local().blocking() as pipe:
        pipe.step(batch.inputs, batch.labels)
    parts = [chunk for stage in split for chunk in stage.chunks]
    modules = [module for part in parts for module in part.modules()]
    assert all(module.training for module in modules)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in modules)
    assert not any(getattr(part.config, "output_router_logits", False) for part in parts)
    assert not calls
