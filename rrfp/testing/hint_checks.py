"""The contract of hints as checks, for authors of hints: ``run_hint_checks(MyHint)``.

The checks run small pipelines on the real cores, without time, in many orders of events, and need no test framework. A
check that fails raises `AssertionError`, which names the pipeline and the breach.

A hint for some pipelines only, such as a schedule for one chunk a stage, raises `ConfigError` in ``open_step`` on the
others; these are then left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rrfp.laboratory import PUBLIC, public_name

# For type checkers, which do not run __getattr__: `as` marks a public name.
if TYPE_CHECKING:
    from rrfp.lab.hint_checks import ALL_CHECKS as ALL_CHECKS
    from rrfp.lab.hint_checks import Check as Check
    from rrfp.lab.hint_checks import HintFactory as HintFactory
    from rrfp.lab.hint_checks import run_hint_checks as run_hint_checks

__all__ = sorted(PUBLIC[__name__])


def __getattr__(name: str) -> Any:
    return public_name(__name__, name)


def __dir__() -> list[str]:
    return list(__all__)
