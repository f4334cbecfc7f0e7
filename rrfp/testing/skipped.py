"""What a check raises that could not look."""

from __future__ import annotations


class SkippedError(Exception):
    """A check could not look; says what it lacks. The contract is then neither kept nor broken."""
