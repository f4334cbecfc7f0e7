"""Names that complete on the command line; the modules that hold them are imported when a shell asks."""

from collections.abc import Iterable


def known_hints() -> Iterable[str]:
    """All hints, plugins and schedules included."""
    from rrfp.hints.registry import hint_names

    return hint_names()


def known_transports() -> Iterable[str]:
    """All transports, plugins included."""
    from rrfp.transports.registry import TRANSPORTS

    return TRANSPORTS.names()


def known_lanes() -> Iterable[str]:
    """All lanes that ``check lane`` names, plugins included."""
    from rrfp.testing.lanes import LANES

    return LANES.names()
