"""The memory limit: by microbatches, by bytes, staircase and reserve; peaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_script import Script, T

from rrfp.core import events as ev
from rrfp.core.events import ChunkReduced
from rrfp.core.usage import Peaks
from rrfp.errors import ConfigError
from rrfp.memory.admission import Limit
from rrfp.memory.byte_limit import ByteLimit
from rrfp.memory.held_bytes import HeldBytes
from rrfp.memory.seen_sizes import SeenSizes
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, StepId

ONE = TaskGraph.chain(1)


@pytest.mark.parametrize(
    ("spec", "limits"),
    [
        (None, [Limit()] * 3),
        (2, [Limit(2)] * 3),
        ("2", [Limit(2)] * 3),
        ("1f1b", [Limit(3), Limit(2), Limit(1)]),
        ("n", [Limit(3)] * 3),
        ("2n", [Limit(6)] * 3),
        (Limit(4, 100), [Limit(4, 100)] * 3),
        ("8GB", [Limit(bytes=8_000_000_000)] * 3),
        ("7MB", [Limit(bytes=7_000_000)] * 3),
        ("6kB", [Limit(bytes=6_000)] * 3),
        ("5B", [Limit(bytes=5)] * 3),
    ],
)
def test_a_limit_is_written_as_a_number_a_preset_or_a_size(spec: Limit | int | str | None, limits: list[Limit]) -> None:
    assert [Limit.resolve(spec, stage, 3) for stage in range(3)] == limits


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("3n", "limit is '3n', must be a number of microbatches or one of: 1f1b, n, 2n, auto, or a size such as 8GB"),
        ("--5", "limit is '--5', must be a number of microbatches or one of: 1f1b, n, 2n, auto, or a size such as 8GB"),
        ("", "limit is '', must be a number of microbatches or one of: 1f1b, n, 2n, auto, or a size such as 8GB"),
        (2.5, "limit is 2.5, must be a number of microbatches or one of: 1f1b, n, 2n, auto, or a size such as 8GB"),
        (True, "limit is True, must be a number of microbatches or one of: 1f1b, n, 2n, auto, or a size such as 8GB"),
        ("8gb", "limit is '8gb', must be a number of microbatches or one of: 1f1b, n, 2n, auto, or a size such as 8GB"),
        ("0GB", "limit: bytes is 0, must be a whole number >= 1, or None"),
        (0, "limit: microbatches is 0, must be a whole number >= 1, or None"),
        ("-1", "limit: microbatches is -1, must be a whole number >= 1, or None"),
    ],
)
def test_an_impossible_limit_is_refused_with_the_choices(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Limit.resolve(spec, 0, 3)
    assert str(caught.value) == message


def test_a_byte_limit_is_at_least_one_byte() -> None:
    with pytest.raises(ConfigError, match=r"^limit: bytes is 1.5, must be a whole number >= 1, or None$"):
        Limit(bytes=1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^limit: bytes is 0, must be a whole number >= 1, or None$"):
        Limit(bytes=0)
    with pytest.raises(ConfigError, match=r"bytes is '8kB', must be .*, such as 8000; limit='8kB' takes the text$"):
        Limit(bytes="8kB")  # type: ignore[arg-type]


def test_a_count_of_another_type_is_kept_as_an_int() -> None:
    assert type(Limit(torch.tensor(3)).microbatches) is int  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^limit: microbatches is tensor\(\[3, 4\]\), must be a whole number >= 1"):
        Limit(torch.tensor([3, 4]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^limit: rule is \['paper'\], must be one of: staircase, paper$"):
        Limit(3, rule=["paper"])  # type: ignore[arg-type]


def test_slots_are_taken_and_given_back_in_the_order_of_the_lane() -> None:
    script = Script(ONE, microbatches=3, limit=2)
    script.enqueued("F0@0")
    assert script.ready == "F1@0 F2@0 B0@0"
    script.enqueued("F1@0")
    assert script.ready == "B0@0 B1@0"
    script.completed("F0@0", "F1@0")
    script.enqueued("B0@0")
    assert script.ready == "F2@0 B1@0"  # behind B0@0 on the lane


def test_what_is_held_now_is_what_the_lane_has_come_to() -> None:
    script = Script(ONE, microbatches=3, limit=2)
    script.enqueued("F0@0", "F1@0")
    assert script.core.holding.held == 1
    script.completed("F0@0")
    script.enqueued("B0@0", "F2@0")
    assert (script.core.holding.held, script.core.view.held) == (2, 2)
    script.completed("F1@0")
    assert script.core.holding.held == 2  # B0@0 runs
    script.completed("B0@0")
    assert script.core.holding.held == 2  # F2@0 runs
    script.completed("F2@0")
    script.ran("B1@0", "B2@0")
    assert (script.core.holding.held, script.core.peaks.held) == (0, 2)


def test_split_backward_holds_the_slot_until_the_weight_task_completes() -> None:
    script = Script(TaskGraph.chain(1, split=True), limit=1)
    script.ran("F0@0", "B0@0")
    assert script.ready == "W0@0"
    script.ran("W0@0")
    assert script.ready == "F1@0"


def test_backwards_are_never_gated() -> None:
    script = Script(TaskGraph.chain(2), stage=1, limit=Limit(1, 1))
    script.arrived("F0@0", "F1@0")
    script.ran("F0@1", held=1000)
    assert script.ready == "B0@1"


def test_the_staircase_keeps_a_slot_for_each_deeper_chunk() -> None:
    """C = 2, K = 1: chunk 0 may start iff D < 1, chunk 1 iff D < 2."""
    script = Script(TaskGraph.chain(1, chunks=2), microbatches=2, limit=1)
    script.ran("F0@0")
    assert script.ready == "F0@1"
    script.ran("F0@1")
    assert script.ready == "B0@1"
    script.ran("B0@1")
    assert script.ready == "B0@0"
    script.ran("B0@0")
    assert script.ready == "F1@0"


def test_the_last_slot_is_reserved_for_the_lowest_microbatch_when_an_order_is_forced() -> None:
    script = Script(TaskGraph.chain(2), stage=1, microbatches=4, limit=2, in_order=((Kind.B, 1),))
    script.arrived("F1@0", "F2@0")
    script.ran("F1@1")
    assert script.ready == ""
    script.arrived("F0@0")
    assert script.ready == "F0@1"
    script.ran("F0@1", "B0@1")
    assert script.ready == "F2@1 B1@1"  # 2 is the lowest now


def test_with_two_chunks_two_slots_are_reserved() -> None:
    script = Script(TaskGraph.chain(1, chunks=2), microbatches=3, limit=2, in_order=((Kind.B, 1),))
    script.ran("F1@0", "F2@0")
    assert script.ready == "F0@0"
    script.ran("F0@0")
    assert script.ready == "F0@1"


def test_nothing_is_reserved_without_a_forced_order() -> None:
    script = Script(TaskGraph.chain(2), stage=1, microbatches=4, limit=2)
    script.arrived("F1@0", "F2@0")
    script.ran("F1@1")
    assert script.ready == "F2@1 B1@1"


def test_a_byte_limit_admits_one_forward_whatever_its_size() -> None:
    script = Script(ONE, microbatches=2, limit=Limit(bytes=10))
    script.ran("F0@0", held=1000)
    assert script.ready == "B0@0"
    script.ran("B0@0")
    assert script.ready == "F1@0"


def test_a_byte_limit_expects_what_was_the_largest_so_far() -> None:
    script = Script(ONE, microbatches=5, limit=Limit(bytes=100))
    script.ran("F0@0", held=40)
    assert script.ready == "F1@0 F2@0 F3@0 F4@0 B0@0"
    script.ran("F1@0", held=30)
    assert script.ready == "B0@0 B1@0"  # 70 + 40 > 100
    script.ran("B0@0")
    assert script.ready == "F2@0 F3@0 F4@0 B1@0"  # 30 + 40
    script.ran("F2@0", held=70)
    assert script.ready == "B1@0 B2@0"  # 100 + 70
    script.ran("B1@0")
    assert script.ready == "B2@0"  # 70 + 70


def test_a_byte_limit_waits_for_the_first_size_and_counts_what_is_in_flight() -> None:
    script = Script(ONE, microbatches=4, limit=Limit(bytes=100))
    script.enqueued("F0@0")
    assert script.ready == "B0@0"
    script.completed("F0@0", held=40)
    script.enqueued("F1@0")
    assert script.ready == "B0@0 B1@0"  # 40 held, 40 in flight


def test_the_expected_size_outlives_the_step() -> None:
    script = Script(ONE, microbatches=1, limit=Limit(bytes=100))
    script.ran("F0@0", held=60)
    script.ran("B0@0")
    script.told(ChunkReduced(0))
    script.opened(StepId(1, Mode.TRAIN, 3))
    script.ran("F0@0", held=10)
    assert script.ready == "F1@0 F2@0 B0@0"
    script.enqueued("F1@0")
    assert script.ready == "B0@0 B1@0"  # 10 + 60 in flight + 60


def test_bytes_are_counted_anew_after_each_task() -> None:
    script = Script(TaskGraph.chain(1, split=True), microbatches=2)
    script.ran("F0@0", held=50)
    script.ran("B0@0", held=20)
    assert script.core.view.held_bytes == 20
    script.ran("W0@0")
    assert (script.core.view.held_bytes, script.core.peaks.num_bytes) == (0, 50)


def test_a_byte_limit_keeps_room_for_the_deeper_chunk() -> None:
    script = Script(TaskGraph.chain(1, chunks=2), microbatches=4, limit=Limit(bytes=100))
    script.ran("F0@0", "F0@1", held=30)
    assert script.ready == "F1@0 F2@0 F3@0 B0@1"  # 60 + 30, and the room for F1@1 is what B0@1 will free
    script.ran("B0@1")
    assert script.ready == "F1@0 F2@0 F3@0 B0@0"  # 30 + 30 + 30
    script.ran("F1@0", held=30)
    assert script.ready == "F1@1 B0@0"  # 60 + 30 + 30 > 100: F2@0 would leave no room for F1@1


def test_a_deeper_chunk_that_holds_nothing_is_admitted_over_the_byte_limit() -> None:
    script = Script(TaskGraph.chain(1, chunks=2), microbatches=2, limit=Limit(bytes=10))
    script.ran("F0@0", held=10)
    assert script.ready == "F0@1"


@pytest.mark.parametrize(("most", "fits_beside_another"), [(59, False), (119, False), (120, True)])
def test_a_forward_is_claimed_if_it_fits_beside_what_is_held_and_claimed_or_if_that_is_nothing(
    most: int, fits_beside_another: bool
) -> None:
    """Else another replica may have room for it. Each microbatch is expected to hold 60 bytes."""
    held, seen = HeldBytes(), SeenSizes(1)
    seen.saw(0, 60)
    limit = ByteLimit(most, held, seen, [range(3)], reserve=False, members=1)
    assert limit.has_room((0, 0), [])
    assert limit.has_room((0, 1), [(0, 0)]) is fits_beside_another
    limit.start((0, 0))
    limit.complete(Kind.F, (0, 0), 60, 0)
    held.hold((0, 0), 60)
    assert limit.has_room((0, 1), []) is fits_beside_another


def test_in_a_forced_order_the_lowest_microbatch_is_admitted_over_the_byte_limit() -> None:
    script = Script(TaskGraph.chain(2), stage=1, microbatches=3, limit=Limit(bytes=10), in_order=((Kind.B, 1),))
    script.arrived("F1@0", "F2@0")
    script.ran("F1@1", held=10)
    assert script.ready == ""
    script.arrived("F0@0")
    assert script.ready == "F0@1"


def test_peaks_are_the_most_of_the_step() -> None:
    script = Script(TaskGraph.chain(2), stage=1, microbatches=3)
    script.arrived("F0@0", "F1@0")
    script.ran("F0@1", "F1@1", held=7)
    script.ran("B0@1", "B1@1")
    script.arrived("F2@0")
    assert script.core.peaks == Peaks(held=2, num_bytes=14, received=2)
    assert script.core.view.held == 0


def test_the_received_peak_counts_what_has_arrived_and_not_started() -> None:
    script = Script(TaskGraph.chain(3), stage=1, microbatches=4, limit=1)
    script.arrived("F0@0", "F1@0")
    script.ran("F0@1")
    script.arrived("F2@0", "F3@0", "B0@2")
    script.ran("B0@1")
    assert script.core.peaks.received == 4


def test_there_are_no_peaks_before_the_first_step() -> None:
    assert Script(ONE, microbatches=0).core.peaks == Peaks()


def test_an_output_is_counted_until_its_send_is_released() -> None:
    script = Script(TaskGraph.chain(2), microbatches=1)
    script.told(ev.Enqueued(T("F0@0")), ev.Completed(T("F0@0"), held=10, output=5))
    assert script.core.view.held_bytes == 15
    script.told(ev.SendReleased(T("F0@0"), 1))
    assert script.core.view.held_bytes == 10
    assert script.core.peaks.num_bytes == 15


def test_a_local_output_is_counted_until_the_next_chunk_has_read_it() -> None:
    script = Script(TaskGraph.chain(1, chunks=2), microbatches=1)
    script.told(ev.Enqueued(T("F0@0")), ev.Completed(T("F0@0"), held=10, output=5), ev.Enqueued(T("F0@1")))
    assert script.core.view.held_bytes == 15
    script.told(ev.Completed(T("F0@1"), held=7))
    assert script.core.view.held_bytes == 17
