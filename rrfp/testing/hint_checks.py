"""The contract of hints as checks, for authors of hints: ``run_hint_checks(MyHint)``.

The checks run small pipelines on the real cores, without time, in many orders of events, and need no test framework. A
check that fails raises `AssertionError`, which names the pipeline and the breach.

A hint for some pipelines only, such as a schedule for one chunk a stage, raises `ConfigError` in ``open_step`` on the
others; these are then left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rrfp.laboratory import PUBLIC
from rrfp.lazy_names import lazy_names

# For type checkers: `as` marks a public name.
if TYPE_CHECKING:
    from rrfp.lab.hint_checks import ALL_CHECKS as ALL_CHECKS
    from rrfp.lab.hint_checks import Check as Check
    from rrfp.lab.hint_checks import HintFactory as HintFactory
    from rrfp.lab.hint_checks import run_hint_checks as run_hint_checks

__all__, __getattr__, __dir__ = lazy_names(__name__, PUBLIC[__name__])
