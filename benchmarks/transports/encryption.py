"""What CURVE costs: zmq over tcp with a secret beside the same without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.transports.aims import Results
from benchmarks.transports.settings import ZMQ_CURVE, ZMQ_TCP, Kind


@dataclass(frozen=True, slots=True)
class EncryptionCost:
    """CURVE over plain in one figure.

    Attributes:
        figure: its name.
        size: bytes of the tensor.
        ratio: of times or of processor time, both in the same round; above 1 where CURVE costs more.
    """

    figure: str
    size: int
    ratio: float


def encryption_costs(results: Results) -> Iterator[EncryptionCost]:
    """Of latency, time of a stream and processor time, at every size."""
    for (size, kind), rounds in results.items():
        slower = 1 / rounds.faster(ZMQ_CURVE, ZMQ_TCP)
        if kind.is_latency:
            yield EncryptionCost(f"one way, {kind} lane", size, slower)
        elif kind is Kind.UNREAD:
            yield EncryptionCost("stream, unread", size, slower)
            yield EncryptionCost("CPU, unread", size, rounds.cpu_ratio(ZMQ_CURVE, ZMQ_TCP))
