"""The memory rules by name, and which of them a stage follows in a step.

Rules of different stages fit together, as the proofs in docs/memory-rules.md show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rrfp.memory.banker import Banker
from rrfp.memory.rules import MemoryRule, Paper, Reserve, RuleContext, Staircase

#: One row a rule on slots; each names the rule on bytes that goes with it (`rrfp.memory.byte_limit`).
RULES: Final[Mapping[str, type[MemoryRule]]] = {rule.name: rule for rule in (Staircase, Paper, Reserve, Banker)}

#: Those that a limit may ask for, and the one that it asks for by default.
OFFERED_RULES: Final = tuple(name for name, rule in RULES.items() if rule.is_offered)
DEFAULT_RULE: Final = Staircase.name


def rule_of(asked: str, context: RuleContext) -> type[MemoryRule]:
    """The rule of a stage whose limit asks for ``asked``."""
    return RULES[RULES[asked].stand_in(context)]
