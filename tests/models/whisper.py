"""Whisper in two stages, encoder and decoder.

The encoder's ``ModelOutput`` arrives as the dict that it is, without attributes. The labels are inside.
"""

from __future__ import annotations

from typing import Any

import torch
from models.case import Case, Microbatch, draw_floats, draw_integers, loss_inside, own_loss
from models.text import IGNORED, VOCABULARY
from torch import Tensor, nn
from transformers import WhisperConfig, WhisperForConditionalGeneration

FRAMES, BINS, START, PADDING = 16, 6, 1, 0


class Encoder(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Any]:
        return {"encoded": self.encoder(features), "labels": labels}


class Decoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.head = model.model.decoder, model.proj_out

    def forward(self, encoded: dict[str, Tensor], labels: Tensor) -> Tensor:
        known = nn.functional.pad(labels[:, :-1], (1, 0), value=START)
        known = known.masked_fill(known == IGNORED, PADDING)
        states = encoded["last_hidden_state"]
        hidden = self.decoder(input_ids=known, encoder_hidden_states=states, use_cache=False).last_hidden_state
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def build() -> nn.Module:
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=BINS,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=FRAMES // 2,
        max_target_positions=16,
        decoder_start_token_id=START,
        bos_token_id=START,
        eos_token_id=2,
        pad_token_id=PADDING,
        begin_suppress_tokens=None,
        use_cache=False,
    )
    model: Any = WhisperForConditionalGeneration(config)
    assert model.proj_out.weight is model.model.decoder.embed_tokens.weight
    result: nn.Module = model
    return result


def cut(model: Any) -> list[nn.Module]:
    return [Encoder(model.model.encoder), Decoder(model)]


def draw(generator: torch.Generator, m: int) -> Microbatch:
    rows = 1 + m % 3
    features = draw_floats(generator, rows, BINS, FRAMES)
    labels = draw_integers(generator, VOCABULARY, rows, 4 + m % 3)
    labels[0, 4:] = IGNORED
    return Microbatch(
        inputs=(features, labels),
        whole={"input_features": features, "labels": labels},
        weight=float((labels != IGNORED).sum()),
    )


CASE = Case(build=build, cut=cut, draw=draw, loss=loss_inside, whole_loss=own_loss)
