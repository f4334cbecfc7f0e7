"""Token microbatches of different batch sizes and lengths, with padding, and their loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from models.case import draw_integers
from torch import Tensor, nn

VOCABULARY = 37

#: What torch's cross entropy leaves out.
IGNORED = -100


@dataclass(frozen=True)
class Tokens:
    """A padded microbatch of text.

    Attributes:
        ids: tokens, (rows, length).
        mask: 1 where there is a token, 0 where there is padding; the same shape.
        labels: the token to predict at each place, or `IGNORED`; the same shape.
    """

    ids: Tensor
    mask: Tensor
    labels: Tensor

    @property
    def count(self) -> float:
        """How many tokens are predicted: the weight of their mean loss."""
        return float((self.labels != IGNORED).sum())


def draw_tokens(generator: torch.Generator, m: int) -> Tokens:
    """Microbatch m: 1 to 3 rows of up to 5 to 9 tokens, padded on the right; each row's prompt has no labels."""
    rows, length = 1 + m % 3, 5 + (3 * m) % 5
    ids = draw_integers(generator, VOCABULARY, rows, length)
    lengths = length - draw_integers(generator, 3, rows, 1) * (m % 2)
    places = torch.arange(length).expand(rows, length)
    mask = (places < lengths).long()
    following = torch.cat([ids[:, 1:], draw_integers(generator, VOCABULARY, rows, 1)], dim=1)
    labels = following.masked_fill((mask == 0) | (places < m % 3), IGNORED)
    return Tokens(ids, mask, labels)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the labels, in float64 (the libraries' own would round to float32)."""
    return nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
