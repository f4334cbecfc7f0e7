"""Every decoder on damaged input: a result or a documented error, in little time and memory.

13,600 cases here, a million and a new seed each time in the long run. A failure names the seed and keeps the case in
`corpus`, which the first test replays.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, get_args

import msgpack
import pytest
from fuzz import checkpoint_targets, file_targets, fuzzer, runtime_targets, wire_targets
from fuzz.fuzzer import EscapeError, Level, Outcomes, case_of, check, corpus, fuzz
from fuzz.mutations import MSGPACK, pack
from fuzz.targets import Target, plain

from rrfp.errors import FrameError
from rrfp.transports.wire.codec import MAX_HEADER_BYTES, Codec
from rrfp.transports.wire.header_checks import MAX_ITEMS

pytestmark = [
    pytest.mark.allow_blocking("decoders run one after the other here, without a turn of the loop between"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

TARGETS: tuple[Target, ...] = (
    *(*wire_targets.TARGETS, *runtime_targets.TARGETS, *file_targets.TARGETS, *checkpoint_targets.TARGETS),
)
LEVELS: tuple[Level, ...] = get_args(Level)

#: For each target and level: these make 13,600, and over a million in the long run.
CASES, LONG_CASES, LONG_PARTS = 400, 9_700, 4

#: The most that a case of at most 100 KiB may take, in bytes: a thousand arrays, each of which claims `MAX_ITEMS`.
MOST_BYTES = 80 << 20

every_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
every_level = pytest.mark.parametrize("level", LEVELS)


@every_target
async def test_input_that_was_not_survived_once_is_survived(target: Target) -> None:
    with target.open() as decode:
        for path in corpus(target):
            try:
                check(target, decode, path.read_bytes(), Outcomes())
            except EscapeError as error:
                error.add_note(f"replayed: {path}")
                raise


@every_target
@every_level
async def test_damaged_input_gives_a_result_or_a_documented_error(target: Target, level: Level) -> None:
    outcomes = fuzz(target, level, 0, CASES)
    assert outcomes.counts.total() == CASES
    assert outcomes.counts["read"], "no case was good any more"
    assert len(outcomes.counts) > 1 or not target.errors, "no case was bad"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(LONG_PARTS))
@every_target
@every_level
async def test_a_million_damaged_inputs(target: Target, level: Level, part: int) -> None:
    fuzz(target, level, int.from_bytes(os.urandom(4)), LONG_CASES)


@every_target
async def test_undamaged_input_is_read(target: Target) -> None:
    good = 0
    with target.open() as decode:
        for index in range(50):
            outcomes = Outcomes()
            check(target, decode, target.write(target.grammar(Random(index))), outcomes)
            good += outcomes.counts["read"]
    assert good >= 10


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
@every_target
async def test_a_case_takes_bounded_memory(target: Target) -> None:
    with target.open() as decode:
        for index in range(40):
            case = case_of(target, LEVELS[index % 2], 1, index)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            check(target, decode, case, Outcomes())
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < MOST_BYTES, f"case {index} of {len(case)} bytes took {peak - before}"


@pytest.mark.usefixtures("traced")
def test_arrays_that_claim_more_than_follows_take_bounded_memory() -> None:
    claims = b"\xdc" + MAX_ITEMS.to_bytes(2, "big")
    for depth in (1, 1000, MAX_HEADER_BYTES // len(claims)):
        tracemalloc.reset_peak()
        with pytest.raises(FrameError):
            Codec(wire_targets.context()).open((claims * depth).ljust(MAX_HEADER_BYTES, b"\x90"))
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES


# The fuzzer itself.


def _fragile(decode: Any) -> Target:
    def grammar(random: Random) -> Any:
        return {"a": [1, 2], "b": "text"}

    return Target("fragile", (ValueError,), grammar, pack, MSGPACK, plain(decode))


def _sums_up(case: bytes) -> object:
    tree = msgpack.unpackb(case)
    if not isinstance(tree, dict):
        raise ValueError("no map")
    return sum(tree["a"])


@every_level
def test_a_decoder_that_fails_is_found_and_its_case_is_kept(
    level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzer, "CORPUS", tmp_path)
    target = _fragile(_sums_up)
    with pytest.raises(EscapeError, match=rf"fragile, {level}, seed 3, case [0-9]+: (TypeError|KeyError)") as caught:
        fuzz(target, level, 3, 1000)
    (path,) = corpus(target)
    index = int(str(caught.value).split("case ")[1].split(":")[0])
    assert path.read_bytes() == case_of(target, level, 3, index)
    with pytest.raises(EscapeError):
        check(target, _sums_up, path.read_bytes(), Outcomes())


def test_a_decoder_that_takes_long_or_says_too_much_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def lingers(case: bytes) -> None:
        sum(range(10_000))

    def repeats(case: bytes) -> None:
        raise ValueError("x" * 100_000)

    with pytest.raises(EscapeError, match="the error has 100000 characters"):
        check(_fragile(repeats), repeats, b"", Outcomes())
    monkeypatch.setattr(fuzzer, "MOST_S", 0.0)
    with pytest.raises(EscapeError, match=r"it took 0\.0 s"):
        check(_fragile(lingers), lingers, b"", Outcomes())
