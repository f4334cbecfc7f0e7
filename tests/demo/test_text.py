"""The demo's data: the same on every rank, and one clear line where a file will not do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rrfp.errors import ConfigError
from rrfp.lab.demo.text import Microbatch, batches, load_text

TEXT = bytes(range(256)) * 4


def make(steps: int = 2, *, seed: int = 0) -> list[list[Microbatch]]:
    return list(batches(TEXT, steps=steps, microbatches=3, microbatch_size=2, sequence_length=16, seed=seed))


def equal(one: list[list[Microbatch]], two: list[list[Microbatch]]) -> bool:
    flat = [[tensor for batch in batches for pair in batch for tensor in pair] for batches in (one, two)]
    return all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


def test_default_text_is_the_language_reference() -> None:
    text = load_text()
    assert len(text) > 300_000
    assert b"generator" in text
    assert text == load_text()


def test_a_file_is_read_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xff\x00any")
    assert load_text(path) == load_text(str(path)) == b"\xff\x00any"


def folder(path: Path) -> None:
    path.mkdir()


def empty(path: Path) -> None:
    path.touch()


def short(path: Path) -> None:
    path.write_bytes(b"x" * 128)


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda path: None, r"cannot be read \(No such file or directory\)"),
        (folder, r"cannot be read \(Is a directory\)"),
        (empty, r"is too short \(0 bytes, must be at least 129\)"),
        (short, r"is too short \(128 bytes, must be at least 129\)"),
    ],
)
def test_a_file_that_will_not_do_is_one_line(prepare: Callable[[Path], None], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "given.txt"
    prepare(path)
    with pytest.raises(ConfigError, match=rf"^text \S+given\.txt: {reason}$"):
        load_text(path, at_least=129)


def test_targets_are_the_inputs_one_byte_further_on() -> None:
    for inputs, targets in itertools.chain.from_iterable(make()):
        assert inputs.shape == targets.shape == (2, 16)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal((inputs + 1) % 256, targets)  # of this text


def test_every_rank_makes_the_same_batches() -> None:
    assert equal(make(), make())
    assert equal(make(steps=5)[:2], make())
    assert not equal(make(), make(seed=1))
    first, second = make()
    assert not equal([first], [second])


def test_the_last_byte_can_be_a_target() -> None:
    [[(inputs, targets)]] = batches(b"abc", steps=1, microbatches=1, microbatch_size=1, sequence_length=2)
    assert (inputs.tolist(), targets.tolist()) == ([[97, 98]], [[98, 99]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"microbatches": 0}, "^microbatches is 0, must be at least 1$"),
        ({"sequence_length": -1}, "^sequence_length is -1, must be at least 1$"),
        ({"seed": -1}, "^seed is -1, must be at least 0$"),
        ({"sequence_length": 1024}, "^the text has 1024 bytes, must have at least 1025$"),
    ],
)
def test_impossible_sizes_are_named(change: dict[str, int], message: str) -> None:
    sizes = {"microbatches": 1, "sequence_length": 8, "seed": 0, **change}
    with pytest.raises(ConfigError, match=message):
        batches(
            TEXT,
            steps=1,
            microbatches=sizes["microbatches"],
            microbatch_size=1,
            sequence_length=sizes["sequence_length"],
            seed=sizes["seed"],
        )
