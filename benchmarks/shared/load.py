"""How much the rest of the machine was doing meanwhile: on a busy machine latencies mean little."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_STAT = Path("/proc/stat")


class OtherLoad:
    """Measures from its making on. Linux only; elsewhere nothing is known."""

    def __init__(self) -> None:
        self._machine, self._own, self._started = machine_busy_s(), _own_busy_s(), os.times().elapsed

    def share(self) -> float | None:
        """The share of all cores' time that other processes took; call it once child processes have ended."""
        if self._machine is None or (now := machine_busy_s()) is None:
            return None
        others = (now - self._machine) - (_own_busy_s() - self._own)
        capacity = (os.times().elapsed - self._started) * (os.cpu_count() or 1)
        return max(0.0, others / capacity)

    def sentence(self) -> str:
        """For people."""
        share = self.share()
        return "" if share is None else f"other processes took {share:.0%} of the machine meanwhile"


def machine_busy_s() -> float | None:
    """Seconds that all cores together have worked since the machine started; None where this is not known."""
    if not _STAT.exists():
        return None
    user, nice, system, _, _, interrupt, soft, *_ = map(int, _STAT.read_text().splitlines()[0].split()[1:])
    return (user + nice + system + interrupt + soft) / os.sysconf("SC_CLK_TCK")


def _own_busy_s() -> float:
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)
