"""Hints made for split backward: BFW (paper, section 4)."""

from __future__ import annotations

from rrfp.hints.alternating import BackwardForward


class BackwardForwardWeight(BackwardForward):
    """BFW: BF, and a weight task if neither a backward nor a forward is ready; after it backwards have priority.

    Why no code of its own? BF does this once backward is split: weight tasks come last in its order, and only after a
    backward do forwards have priority. On unsplit stages it is BF.
    """

    wants_split = True
