"""The demo's data: the bytes of a text, and batches cut from random places of it.

A batch depends on the seed and the step alone, so every rank makes the same batch and none is sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from rrfp.errors import ConfigError

if TYPE_CHECKING:  # the command looks at the text, and refuses a wrong one, without torch
    from torch import Tensor

#: Inputs and targets of a microbatch: bytes as int64, microbatch size x length, the targets one byte further on.
Microbatch: TypeAlias = "tuple[Tensor, Tensor]"


def load_text(
    path: str | os.PathLike[str] | None = None,
    *,
    # The fewest bytes: one more than a sequence has.
    at_least: int = 2,
) -> bytes:
    """Read the text to learn; by default the language reference of CPython."""
    if path is None:
        name, text = "the language reference", _language_reference()
    else:
        name = os.fspath(path)
        try:
            text = Path(path).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            raise ConfigError(f"text {name}: cannot be read ({_reason(error)})") from None
    if len(text) < at_least:
        raise ConfigError(f"text {name}: is too short ({len(text)} bytes, must be at least {at_least})")
    return text


def _language_reference() -> bytes:
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError:
        raise ConfigError("this Python comes without pydoc_data.topics: name a text with --text FILE") from None
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _reason(error: OSError | ValueError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def batches(
    text: bytes,
    *,
    steps: int,
    microbatches: int,
    microbatch_size: int,
    sequence_length: int,
    # >= 0; the same arguments give the same batches, and more steps the same first ones.
    seed: int = 0,
) -> Iterator[list[Microbatch]]:
    sizes = {"microbatches": microbatches, "microbatch_size": microbatch_size, "sequence_length": sequence_length}
    for field, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{field} is {value}, must be at least 1")
    if seed < 0:
        raise ConfigError(f"seed is {seed}, must be at least 0")
    if len(text) <= sequence_length:
        raise ConfigError(f"the text has {len(text)} bytes, must have at least {sequence_length + 1}")
    data = np.frombuffer(text, dtype=np.uint8)

    def batch(step: int) -> list[Microbatch]:
        random = np.random.default_rng([seed, step])
        return [_microbatch(data, microbatch_size, sequence_length, random) for _ in range(microbatches)]

    return map(batch, range(steps))


def _microbatch(data: np.ndarray, size: int, length: int, random: np.random.Generator) -> Microbatch:
    import torch

    first = random.integers(0, len(data) - length, size=(size, 1))
    tokens = torch.from_numpy(data[first + np.arange(length + 1)].astype(np.int64))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
