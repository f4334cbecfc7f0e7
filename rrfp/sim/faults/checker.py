"""How a run with faults must end, by the contracts alone; the checkers of its ranks watch the way there."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Ending(StrEnum):
    """How a run ends."""

    FINISHED = "finished"  # every task ran once, on the right inputs
    REFUSED = "refused"  # a core raised ProtocolError, which names the message
    STALLED = "stalled"  # nothing can happen any longer; the report names the message and the stage that owes it
    ABORTED = "aborted"  # every living core received an abort that names the dead rank
    CRASHED = "crashed"  # an exception that is no ProtocolError, or events without end: always wrong
    UNFIT = "unfit"  # the hint said, by a ConfigError, that it is not made for this pipeline


_FINISHED = frozenset({Ending.FINISHED})
_REFUSED = frozenset({Ending.REFUSED})
_STALLED = frozenset({Ending.STALLED})

#: How a run with only this fault may end. Which of two it is, the rules below say for each run:
#: - lose: refused if a later message of the channel and step arrives, stalled if none does;
#: - swap, delay of the message itself: refused if a later one of the channel and step overtakes it, else harmless;
#: - death: aborted, unless every stage had finished.
#: Credits and a follower's reports name their task and are in no order: swapped or late ones are harmless. Of the bytes
#: that a follower reports, the leader waits for those of a forward of a new signature; without others it counts too
#: little, and transports lose nothing.
#: The log and the rounds of an agreement are in order, and come to a stand at what is missing.
REQUIRED: Mapping[str, frozenset[Ending]] = {
    "spike": _FINISHED,
    "pause": _FINISHED,
    "death": frozenset({Ending.ABORTED, Ending.FINISHED}),
    "lose": _REFUSED | _STALLED,
    "lose credit": _STALLED,
    "lose order": _REFUSED | _STALLED,
    "lose report": _STALLED,
    "lose bytes": _FINISHED | _STALLED,
    "lose proposal": _STALLED,
    "lose outcome": _REFUSED | _STALLED,
    "duplicate": _REFUSED,
    "duplicate credit": _REFUSED,
    "duplicate order": _REFUSED,
    "duplicate report": _REFUSED,
    "duplicate bytes": _REFUSED | _FINISHED,
    "duplicate proposal": _REFUSED,
    "duplicate outcome": _REFUSED,
    "swap": _REFUSED | _FINISHED,
    "swap credit": _FINISHED,
    "swap order": _REFUSED | _FINISHED,
    "swap report": _FINISHED,
    "swap bytes": _FINISHED,
    "swap proposal": _FINISHED,
    "swap outcome": _REFUSED | _FINISHED,
    "delay": _REFUSED | _FINISHED,
    "delay credit": _FINISHED,
    "delay order": _REFUSED | _FINISHED,
    "delay report": _FINISHED,
    "delay bytes": _FINISHED,
    "delay proposal": _FINISHED,
    "delay outcome": _REFUSED | _FINISHED,
    "delay copy": _REFUSED,
    "delay copy credit": _REFUSED,
    "delay copy order": _REFUSED,
    "delay copy report": _REFUSED,
    "delay copy bytes": _FINISHED,
    "delay copy proposal": _REFUSED,
    "delay copy outcome": _REFUSED,
}
