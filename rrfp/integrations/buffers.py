"""Forwards that are no part of the training leave a model's buffers as they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def restored_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Afterwards the buffers have the values from before, whatever forwards within have written."""
    parts = {part for module in modules for part in module.modules()}
    every = [(part, name, each) for part in parts for name, each in part._buffers.items() if each is not None]
    with torch.no_grad():
        # All: torch does not count the writes of running statistics.
        kept = [(part, name, each, None if each.is_inference() else each.clone()) for part, name, each in every]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, values in kept:
                part._buffers[name] = buffer
                if values is not None:
                    buffer.copy_(values)
