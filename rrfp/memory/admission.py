"""How much a stage may hold: the limit that a user asks for, and the rules that it may name, which say what it admits.

Rules of different stages fit together, as the proofs in docs/memory-rules.md show.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from rrfp.errors import ConfigError
from rrfp.memory.banker import Banker
from rrfp.memory.rules import MemoryRule, Paper, Reserve, RuleContext, Staircase
from rrfp.plain import flag, one_of, or_none, whole

#: One row a rule on slots; each names the rule on bytes that goes with it (`rrfp.memory.byte_limit`).
RULES: Final[Mapping[str, type[MemoryRule]]] = {rule.name: rule for rule in (Staircase, Paper, Reserve, Banker)}

#: Those that a limit may ask for, and the one that it asks for by default.
OFFERED_RULES: Final = tuple(name for name, rule in RULES.items() if rule.is_offered)
DEFAULT_RULE: Final = Staircase.name

#: The limit that follows round trips between stages; see `rrfp.memory.round_trips`.
AUTO: Final = "auto"
LIMIT_PRESETS = ("1f1b", "n", "2n", AUTO)

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(rf"([0-9]+)({'|'.join(_UNITS)})")


@dataclass(frozen=True, slots=True)
class Limit:
    """How much a stage may hold.

    Attributes:
        microbatches: K, at least 1: K * C slots for chunk tasks. None: unlimited.
        bytes: bytes held by microbatches in work and by outputs on their way out, at least 1. None: unlimited.
        rule: how the chunks of a stage share the slots: ``"staircase"``, or ``"paper"`` for the paper's Appendix C. The
            two are one rule where a stage has one chunk.
        auto: K follows the round trips between stages, step by step, as ``"auto"`` does; ``microbatches`` is then the
            most that it may be. Only with the rule ``"staircase"``.

    Raises:
        ConfigError: on a value that is no whole number >= 1, an unknown rule, or bytes or ``auto`` under the paper's
            rule.
    """

    microbatches: int | None = None
    bytes: int | None = None
    rule: str = DEFAULT_RULE
    auto: bool = False

    def __post_init__(self) -> None:
        for field, value in (("microbatches", self.microbatches), ("bytes", self.bytes)):
            if (size := bytes_of(value)) is not None:
                text = f"must be a whole number >= 1, such as {size}; limit={value!r} takes the text"
                raise ConfigError(f"limit: {field} is {value!r}, {text}")
            object.__setattr__(self, field, or_none(whole, f"limit: {field}", value, 1))
        one_of(OFFERED_RULES, "limit: rule", self.rule)
        if self.bytes is not None and not RULES[self.rule].counts_bytes:
            raise ConfigError(f"limit: bytes must be None with rule {self.rule!r}, which counts microbatches only")
        flag("limit: auto", self.auto)
        if self.auto and self.rule != DEFAULT_RULE:
            raise ConfigError(f"limit: auto must be False with rule {self.rule!r}, must have rule {DEFAULT_RULE!r}")

    def __repr__(self) -> str:
        # States that were saved before ``auto`` was added have this text of a limit.
        auto = ", auto=True" if self.auto else ""
        return f"Limit(microbatches={self.microbatches}, bytes={self.bytes}, rule={self.rule!r}{auto})"

    def at(self, microbatches: int | None) -> Limit:
        """This limit with K, at most its own, where there is one; itself without.

        Args:
            microbatches: K, or None.
        """
        if microbatches is None:
            return self
        most = microbatches if self.microbatches is None else min(microbatches, self.microbatches)
        return replace(self, microbatches=most, auto=False)

    def slots(self, chunks: int) -> int | None:
        """K * C, the chunk tasks that a stage may hold; None: unlimited.

        Args:
            chunks: the stage's.
        """
        return None if self.microbatches is None else self.microbatches * chunks

    @classmethod
    def resolve(
        cls, spec: Limit | int | str | None, stage: int, stages: int, others: str = "", *, distance: int | None = None
    ) -> Limit:
        """The limit of ``stage`` that a caller's ``spec`` means.

        Args:
            spec: a Limit; K as a number or its text; ``"1f1b"`` (K = N - stage: what 1F1B holds); ``"n"`` (K = N: what
                its fullest stage holds); ``"2n"`` (K = 2 N); bytes as a text, a whole number of B, kB, MB or GB (powers
                of 1000) such as ``"8GB"``; None for unlimited.
            stage: 0..stages-1.
            stages: N.
            others: ends the error, for a caller whose users may pass a Limit.
            distance: the stage's `Graph.distance_to_sink`, which stands for N - stage in ``"1f1b"``; None: a chain's.

        Raises:
            ConfigError: for anything else; lists the choices.
        """
        if isinstance(spec, Limit):
            return spec
        if spec is None:
            return cls()
        if spec == "1f1b":
            return cls(stages - stage if distance is None else distance)
        if spec == "n":
            return cls(stages)
        if spec == "2n":
            return cls(2 * stages)
        if spec == AUTO:
            return cls(auto=True)
        if (size := bytes_of(spec)) is not None:
            return cls(bytes=size)
        try:
            if isinstance(spec, bool):
                raise TypeError
            microbatches = int(spec) if isinstance(spec, str) else operator.index(spec)
        except (TypeError, ValueError):
            raise ConfigError(
                f"limit is {spec!r}, must be a number of microbatches or one of: {', '.join(LIMIT_PRESETS)}, or a size "
                f"such as 8GB{others}"
            ) from None
        return cls(microbatches)


def bytes_of(spec: object) -> int | None:
    """The bytes of a text such as ``8GB``; None for anything else."""
    size = _SIZE.fullmatch(spec) if isinstance(spec, str) else None
    return None if size is None else int(size[1]) * _UNITS[size[2]]


def rule_of(asked: str, context: RuleContext) -> type[MemoryRule]:
    return RULES[RULES[asked].stand_in(context)]
