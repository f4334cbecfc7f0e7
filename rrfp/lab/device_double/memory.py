"""The memory of the double: what a block sees of it, what is covered when the block ends, and which uses are races."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from rrfp.lab.device_double.regions import Clock, Reading, Region, Regions, Work


@dataclass(slots=True, eq=False)
class Segment:
    """A block that runs, or the part of one between two events."""

    #: The number of its stream.
    stream: int
    #: Names it in problems.
    label: str
    #: The work that its stream's order puts before it.
    clock: Clock
    #: The storages read so far, by key.
    read: dict[int, Reading] = field(default_factory=dict)
    written: dict[int, Region] = field(default_factory=dict)
    #: Those that it may see though work that writes them is pending.
    opened: list[Region] = field(default_factory=list)
    #: Those whose use was reported.
    racing: set[Region] = field(default_factory=set)


class Memory:
    """What each stream may see of the device's memory; not thread-safe."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self.regions = Regions()
        self._report = report
        #: Work that was issued and that the device has not run.
        self._pending: set[Work] = set()
        #: What threads issue now. No event lies behind it yet, so nothing can be ordered behind it.
        self._segments: set[Segment] = set()
        #: Since the device failed: what may not be freed, and nobody has kept; None as long as it works.
        self._at_risk: list[Region] | None = None
        self._kept: list[torch.UntypedStorage] | None = None

    def begin(self, segment: Segment) -> None:
        self._segments.add(segment)
        self._check_reuse(segment)
        for region in self.regions:
            if region.writers and all(work.is_before(segment.clock) for work in region.writers):
                self._uncover(region)
                region.viewers.add(segment)
                segment.opened.append(region)

    def use(self, segment: Segment, operator: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        for tensor in reads:
            for key, region in self.regions.of(tensor):
                self._check_writers(segment, operator, "reads", key, region)
                if key not in segment.read:
                    segment.read[key] = Reading(region, operator)
        for tensor in writes:
            for key, region in self.regions.of(tensor):
                self._check_writers(segment, operator, "writes", key, region)
                self._check_readers(segment, operator, key, region)
                region.kept = None  # in a race, the last write stays
                region.writes += 1
                region.viewers.add(segment)
                segment.written[key] = region

    def made(self, segment: Segment, tensors: Sequence[Tensor], known: Set[int]) -> None:
        """The storages of ``tensors`` are new, but for those in ``known``."""
        for tensor in tensors:
            for key, region in self.regions.of(tensor):
                if key not in known:
                    region.owner = segment.stream
                    region.viewers.add(segment)
                    segment.written[key] = region

    def end(self, segment: Segment, work: Work | None) -> None:
        """Cover what is not complete; ``work`` is the segment's, if any."""
        self._segments.discard(segment)
        if work is not None:
            self._pending.add(work)
            work.writes.extend(segment.written.values())
            for region in work.writes:
                region.writers.add(work)
            for reading in segment.read.values():
                work.uses.append(reading.region)
                reading.region.readers.add(work)
                if reading.region.owner != work.stream:
                    reading.checksum, reading.writes = reading.region.checksum(), reading.region.writes
                    work.reads.append(reading)
        for region in {*segment.opened, *segment.written.values()}:
            region.viewers.discard(segment)
            if region.writers and not region.viewers:
                region.cover()
        self._check_reuse(segment)
        self.regions.sweep()

    def complete(self, work: Work) -> None:
        work.is_done = True
        self._pending.discard(work)
        for region in work.writes:
            region.writers.discard(work)
            if not region.writers:
                self._uncover(region)
        for region in work.uses:
            region.readers.discard(work)
        for reading in work.reads:
            self._check_reading(work, reading)

    def allocate(self, tensor: Tensor, stream: int | None, segment: Segment | None) -> None:
        """``tensor`` is new memory of ``stream``, or the host's with None."""
        for key, region in self.regions.of(tensor):
            region.owner, region.is_on_host = stream, stream is None
            region.is_outside = segment is None and stream is not None
            if segment is not None:
                region.viewers.discard(segment)
                segment.written.pop(key, None)

    def note_use(self, tensor: Tensor, stream: int) -> None:
        for _, region in self.regions.of(tensor):
            region.noted.add(stream)

    def fail(self) -> None:
        """The device has failed: from now on it cannot free what was noted."""
        self._at_risk = [region for region in self.regions if region.is_noted and not region.is_freed]

    def keep_noted(self) -> None:
        self._kept = [
            storage for region in self.regions if region.is_noted and (storage := region.storage()) is not None
        ]
        self._at_risk = None

    def close(self) -> None:
        """Report what was freed though the device had failed, and keep nothing any more."""
        for region in self._at_risk or ():
            if region.is_freed:
                self._report(f"{_size(region)} of noted memory were freed after the device had failed")
        self._at_risk = self._kept = None

    def _uncover(self, region: Region) -> None:
        if not region.uncover():
            self._report(f"{_size(region)} were written to by the host before the work that writes them was complete")

    def _check_writers(self, segment: Segment, operator: str, verb: str, key: int, region: Region) -> None:
        issued = (work.label for work in region.writers if not work.is_before(segment.clock))
        beside = (other.label for other in self._segments if other is not segment and key in other.written)
        if other := next(chain(issued, beside), None):
            self._report_race(segment, region, f"{operator} {verb} {_size(region)} that {other} writes")

    def _check_readers(self, segment: Segment, operator: str, key: int, region: Region) -> None:
        issued = (work.label for work in region.readers if not work.is_before(segment.clock))
        beside = (other.label for other in self._segments if other is not segment and key in other.read)
        if other := next(chain(issued, beside), None):
            self._report_race(segment, region, f"{operator} writes {_size(region)} that {other} reads")

    def _report_race(self, segment: Segment, region: Region, race: str) -> None:
        if region not in segment.racing:
            segment.racing.add(region)
            self._report(f"{segment.label}: {race}, without waiting for it")

    def _check_reading(self, work: Work, reading: Reading) -> None:
        """Was memory that complete work has read still there and the same?"""
        region = reading.region
        if region.is_freed:
            is_of_no_block = region.is_outside or (region.owner is None and not region.is_on_host)
            if is_of_no_block and work.stream not in region.noted:
                self._report_freed(work, reading)
            return
        now = region.checksum()
        if reading.writes == region.writes and None not in (now, reading.checksum) and now != reading.checksum:
            self._report(
                f"{work.label}: {_size(region)} that it reads ({reading.operator}) were written to before it was "
                "complete"
            )

    def _check_reuse(self, segment: Segment) -> None:
        """Does its stream reuse freed memory before another one's work is done?"""
        for work in self._pending:
            if work.stream == segment.stream or work.is_before(segment.clock):
                continue
            for reading in work.reads:
                region = reading.region
                if region.owner == segment.stream and region.is_freed and work.stream not in region.noted:
                    region.noted.add(work.stream)  # reported once
                    self._report_freed(work, reading)

    def _report_freed(self, work: Work, reading: Reading) -> None:
        self._report(
            f"{work.label}: {_size(reading.region)} that it reads ({reading.operator}) were freed before it was "
            "complete, without note_use"
        )


def _size(region: Region) -> str:
    return f"{region.num_bytes} bytes"
