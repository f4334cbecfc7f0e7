"""T5 in four stages, a chain of encoder and decoder: what later stages need travels through every tuple.

One weight is the embedding of both and the head. Position biases come from the first block of each stack and are
learned, so their gradients travel back. The labels are inside: the last stage returns the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from models.case import Case, Microbatch, draw_integers, loss_inside, own_loss
from models.text import IGNORED, VOCABULARY, draw_tokens
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask


class EncoderStart(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embedding, self.block, self.config = model.shared, model.encoder.block[0], model.config

    def forward(self, ids: Tensor, padding: Tensor, labels: Tensor) -> Any:
        hidden = self.embedding(ids)
        mask = create_bidirectional_mask(self.config, hidden, attention_mask=padding)
        hidden, bias, _ = self.block(hidden, mask)
        return hidden, bias, mask, padding, labels


class EncoderEnd(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.block, self.norm = model.encoder.block[1], model.encoder.final_layer_norm

    def forward(self, hidden: Tensor, bias: Tensor, mask: Tensor | None, padding: Tensor, labels: Tensor) -> Any:
        hidden, *_ = self.block(hidden, mask, bias)
        return self.norm(hidden), padding, labels


class DecoderStart(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embedding, self.block = model.shared, model.decoder.block[0]
        self.config, self.start = model.decoder.config, model.config.decoder_start_token_id

    def forward(self, encoded: Tensor, padding: Tensor, labels: Tensor) -> Any:
        known = nn.functional.pad(labels[:, :-1], (1, 0), value=self.start)
        hidden = self.embedding(known.masked_fill(known == IGNORED, self.config.pad_token_id))
        causal = create_causal_mask(self.config, hidden, attention_mask=None, past_key_values=None)
        across = create_bidirectional_mask(self.config, hidden, attention_mask=padding, encoder_hidden_states=encoded)
        hidden, *biases = self.block(hidden, causal, None, encoded, across)
        return hidden, causal, encoded, across, biases, labels


class DecoderEnd(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.block, self.norm, self.head = model.decoder.block[1], model.decoder.final_layer_norm, model.lm_head
        self.scale = model.model_dim**-0.5 if model.config.scale_decoder_outputs else 1.0

    def forward(
        self,
        hidden: Tensor,
        causal: Tensor | None,
        encoded: Tensor,
        across: Tensor | None,
        biases: list[Tensor],
        labels: Tensor,
    ) -> Tensor:
        hidden, *_ = self.block(hidden, causal, biases[0], encoded, across, biases[1])
        scores = self.head(self.norm(hidden) * self.scale)
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def build() -> nn.Module:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        relative_attention_num_buckets=8,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    model: Any = T5ForConditionalGeneration(config)
    assert model.lm_head.weight is model.shared.weight
    result: nn.Module = model
    return result


def cut(model: Any) -> list[nn.Module]:
    return [EncoderStart(model), EncoderEnd(model), DecoderStart(model), DecoderEnd(model)]


def draw(generator: torch.Generator, m: int) -> Microbatch:
    tokens = draw_tokens(generator, m)
    labels = draw_integers(generator, VOCABULARY, tokens.ids.shape[0], 3 + m % 4)
    labels[0, 3:] = IGNORED
    return Microbatch(
        inputs=(tokens.ids, tokens.mask, labels),
        whole={"input_ids": tokens.ids, "attention_mask": tokens.mask, "labels": labels, "use_cache": False},
        weight=float((labels != IGNORED).sum()),
    )


CASE = Case(build=build, cut=cut, draw=draw, loss=loss_inside, whole_loss=own_loss)
