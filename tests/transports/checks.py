"""The checks of the public suite by name."""

from __future__ import annotations

from rrfp.testing.transport_checks import ALL_CHECKS

CHECKS = {check.__name__.removeprefix("check_"): check for check in ALL_CHECKS}
