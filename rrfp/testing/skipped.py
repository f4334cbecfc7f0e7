"""The errors of a check that cannot look, or has nothing to look at."""

from __future__ import annotations


class SkippedError(Exception):
    """A check cannot look; the message names the part that it lacks. The contract is neither kept nor broken."""


class NotOfferedError(SkippedError):
    """A check is about an option that the plugin does not offer: there is nothing to keep, and nothing to report."""
