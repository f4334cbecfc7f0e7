"""Runs decoders on damaged input, and keeps the input that one of them did not survive."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

from fuzz.mutations import damaged, scrambled
from fuzz.targets import Decode, Target

#: Input that a decoder did not survive once. Every run replays it.
CORPUS = Path(__file__).parent / "corpus"

#: The most seconds of CPU time for one case, on a slow machine: good input takes a thousandth of that.
MOST_S = 1.0

#: The most characters of an error: an error that repeats all of its input lets an attacker fill the log.
MOST_TEXT = 20_000

#: `grammar` changes nodes of good input, `bytes` its bytes.
Level = Literal["grammar", "bytes"]


@dataclass
class Outcomes:
    """How many cases ended how: ``read``, or the name of the error."""

    counts: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0


class EscapeError(AssertionError):
    """A decoder did not survive a case."""


def case_of(target: Target, level: Level, seed: int, index: int) -> bytes:
    """One case, by its numbers alone."""
    random = Random((seed << 32) + index)
    tree = target.grammar(random)
    if level == "grammar":
        return target.write(damaged(random, tree, target.values) if random.random() < 0.95 else tree)
    return scrambled(random, target.write(tree), target.write(target.grammar(random)))


def check(target: Target, decode: Decode, case: bytes, outcomes: Outcomes) -> None:
    """Decode one case: a result or a documented error, in time. Anything else is an `EscapeError`."""
    started = time.thread_time()
    try:
        decode(case)
        end = "read"
    except target.errors as error:
        end = type(error).__name__
        if len(text := _text(error)) > MOST_TEXT:
            raise EscapeError(f"the error has {len(text)} characters: {text[:200]}") from error
    except Exception as error:
        raise EscapeError(f"{type(error).__name__}: {error!s:.200}") from error
    outcomes.counts[end] += 1
    outcomes.slowest_s = max(outcomes.slowest_s, spent := time.thread_time() - started)
    if spent > MOST_S:
        raise EscapeError(f"it took {spent:.1f} s")


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception as broken:
        raise EscapeError(f"the error has no text: {type(broken).__name__}") from broken


def fuzz(target: Target, level: Level, seed: int, cases: int) -> Outcomes:
    """Run so many cases; an `EscapeError` says how to repeat one, which is in the corpus then."""
    outcomes = Outcomes()
    with target.open() as decode:
        for index in range(cases):
            case = case_of(target, level, seed, index)
            try:
                check(target, decode, case, outcomes)
            except EscapeError as error:
                path = keep(target, case)
                raise EscapeError(
                    f"{target.name}, {level}, seed {seed}, case {index}: {error}; the case is in {path}, which belongs "
                    "to the commit that mends it"
                ) from error
    return outcomes


def keep(target: Target, case: bytes) -> Path:
    """Add a case to the corpus."""
    path = CORPUS / target.name / f"{hashlib.sha256(case).hexdigest()[:12]}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(case)
    return path


def corpus(target: Target) -> Iterator[Path]:
    """The cases of a target's corpus."""
    yield from sorted((CORPUS / target.name).glob("*.bin"))
