"""What a microbatch is expected to hold, by what is known of it and by what others held."""

from __future__ import annotations

from rrfp.memory.seen_sizes import REMEMBERED_STEPS, KnownSizes, SeenSizes


def forwarded(seen: SeenSizes, held: int, preview: KnownSizes) -> None:
    seen.judge(0, held, preview)
    seen.saw(0, held, preview)


def test_where_nothing_is_known_of_a_microbatch_the_largest_is_expected() -> None:
    seen = SeenSizes(2)
    assert seen.expect(0, KnownSizes()) == 0
    seen.saw(0, 40)
    seen.saw(0, 10, KnownSizes(size=1))
    assert seen.expect(0, KnownSizes()) == 40
    assert seen.expect(1, KnownSizes()) == 0, "of another chunk nothing was seen"


def test_a_microbatch_is_expected_to_hold_its_own_bytes_by_its_size() -> None:
    seen = SeenSizes(1)
    for size, held in ((4.0, 40), (1.0, 13)):
        seen.saw(0, held, KnownSizes(size=size))
    assert [seen.expect(0, KnownSizes(size=size)) for size in (1.0, 2.0, 3.0)] == [13, 22, 31], "on a line between them"
    assert seen.expect(0, KnownSizes(size=0.5)) == 7, "below them in proportion"
    assert seen.expect(0, KnownSizes(size=4.0)) == 40
    assert seen.expect(0, KnownSizes(size=8.0)) == 80, "beyond them in proportion"
    assert seen.expect(0, KnownSizes(size=0.0)) == 40, "a size of 0 says nothing"
    seen.saw(0, 50, KnownSizes(size=3.0))
    assert seen.expect(0, KnownSizes(size=3.5)) == 50, "a larger one is not expected to hold less"


def test_sizes_of_any_magnitude_make_a_number() -> None:
    seen = SeenSizes(1)
    seen.saw(0, 40, KnownSizes(size=5e-324))
    assert seen.expect(0, KnownSizes(size=1e308)) == 2**63


def test_a_part_that_is_the_same_for_all_is_expected_once() -> None:
    """A microbatch without an image holds nothing beside the output that it passes on, and says nothing of others."""
    seen = SeenSizes(1)
    for inputs, held in ((1, 1 + 50), (1000, 1000 + 50)):
        seen.saw(0, held, KnownSizes(input_bytes=inputs))
    assert [seen.expect(0, KnownSizes(input_bytes=inputs)) for inputs in (1, 300, 1000)] == [51, 350, 1050]


def test_of_two_numbers_the_one_counts_that_decides_the_bytes() -> None:
    seen = SeenSizes(1)
    for size, inputs, held in ((1.0, 10, 100), (1.0, 40, 400), (2.0, 20, 200)):
        forwarded(seen, held, KnownSizes(size, inputs))
    assert seen.expect(0, KnownSizes(1.0, 5)) == 50
    assert seen.expect(0, KnownSizes(1.0)) == 400


def test_one_wrong_expectation_does_not_outweigh_all_others() -> None:
    """Here the first microbatch has hardly any inputs and sends an output; from it much is expected of the second."""
    seen = SeenSizes(1)
    for size, inputs in ((3.0, 1), (1.0, 1000), (2.0, 400), (1.0, 800), (3.0, 200)):
        forwarded(seen, inputs + 50, KnownSizes(size, inputs))
    assert seen.expect(0, KnownSizes(3.0, 300)) == 350


def test_which_number_decides_the_bytes_is_remembered_and_forgotten_with_them() -> None:
    seen = SeenSizes(1)
    for _ in range(2):
        forwarded(seen, 100, KnownSizes(1.0, 10))
        forwarded(seen, 900, KnownSizes(1.0, 90))
    for _ in range(REMEMBERED_STEPS):
        assert seen.expect(0, KnownSizes(1.0, 50)) == 500
        seen.open_step()
    seen.open_step()
    for _ in range(2):
        forwarded(seen, 100, KnownSizes(1.0, 90))
        forwarded(seen, 900, KnownSizes(9.0, 90))
    assert seen.expect(0, KnownSizes(5.0, 90)) == 500


def test_as_long_as_two_numbers_fit_equally_the_more_cautious_one_counts() -> None:
    seen = SeenSizes(1)
    seen.saw(0, 100, KnownSizes(size=10.0, input_bytes=100))
    assert seen.expect(0, KnownSizes(size=1.0, input_bytes=50)) == 50
    assert seen.expect(0, KnownSizes(size=9.0, input_bytes=50)) == 90


def test_what_its_signature_showed_is_expected_whatever_its_numbers_are() -> None:
    seen = SeenSizes(1)
    seen.saw_signature(0, "image", 70)
    seen.saw(0, 90, KnownSizes(signature="image"))
    seen.saw(0, 10, KnownSizes(1.0, 1, "text"))
    for _ in range(REMEMBERED_STEPS):
        assert seen.expect(0, KnownSizes(1.0, 1, "image")) == 90
        seen.open_step()
    assert seen.expect(0, KnownSizes(1.0, 1, "image")) == 10 + 80
    assert seen.open_step().expect(0, KnownSizes(1.0, 1, "image")) == 0
