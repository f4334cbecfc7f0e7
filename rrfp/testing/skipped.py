"""The error of a check that cannot look."""

from __future__ import annotations


class SkippedError(Exception):
    """A check cannot look; the message names the part that it lacks. The contract is neither kept nor broken."""
