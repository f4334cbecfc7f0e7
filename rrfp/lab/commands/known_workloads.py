"""Names of workloads that complete on the command line; their modules are imported when a shell asks."""

from __future__ import annotations

from collections.abc import Iterable


def known_profiles() -> Iterable[str]:
    """All profiles of workloads."""
    from rrfp.lab.generators.workloads import PROFILES

    return PROFILES


def known_jitter() -> Iterable[str]:
    """All levels of jitter."""
    from rrfp.lab.generators.jitter import JITTER_LEVELS

    return JITTER_LEVELS


def known_latencies() -> Iterable[str]:
    """All models of latency."""
    from rrfp.lab.generators.latency import LATENCY_MODELS

    return [name for name in LATENCY_MODELS if name.islower()]
