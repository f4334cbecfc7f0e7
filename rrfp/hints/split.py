"""Hints made for split backward: BFW (paper, section 4)."""

from __future__ import annotations

from rrfp.hints.alternating import BackwardForward


class BackwardForwardWeight(BackwardForward):
    """BFW: BF, and a weight task when neither a backward nor a forward is ready; a new round starts after it.

    That is what BF does once backward is split, since weight tasks are filler for every hint that does not name them
    and only a backward leaves the next chance to forward. On unsplit stages it is BF.
    """

    wants_split = True
