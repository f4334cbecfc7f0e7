"""The least concave curve, through zero and never falling, that none of some points lies above.

A limit on bytes expects of a microbatch what this curve says at a number that is known of it. Bytes in proportion to
the number lie on the curve; so do bytes of which a part is the same for all, such as an output, from the smallest
number seen on.

Rejected: the steepest proportion of any point, capped by the highest point. One point with a number near zero, such as
that of a microbatch that passes an encoder without an image and still sends an output, then puts all others at the cap.
"""

from __future__ import annotations

import math
from bisect import bisect_left

Point = tuple[float, float]


class ConcaveEnvelope:
    """See the module's docstring. Numbers of points are more than 0, and their bytes are not negative."""

    __slots__ = ("_corners", "_largest")

    def __init__(self) -> None:
        #: Where the curve bends, by rising number and bytes; after the last one it is level.
        self._corners: list[Point] = [(0.0, 0.0)]
        self._largest = 0.0

    def __bool__(self) -> bool:
        """Whether there is a point with any bytes."""
        return len(self._corners) > 1

    def add(self, number: float, num_bytes: float) -> None:
        """No longer lie below a point. Takes little more than a search among the corners."""
        self._largest = max(self._largest, number)
        if num_bytes <= self._at(number):
            return
        corners, point = self._corners, (number, num_bytes)
        begin = end = bisect_left(corners, (number,))
        while end < len(corners) and _slope(point, corners[end]) <= self._slope_after(end):
            end += 1
        while begin > 1 and _slope(corners[begin - 2], corners[begin - 1]) <= _slope(corners[begin - 1], point):
            begin -= 1
        corners[begin:end] = [point]

    def cover(self, other: ConcaveEnvelope) -> None:
        """Nowhere lie below ``other``, up to its largest number."""
        for number, num_bytes in other._corners[1:]:
            self.add(number, num_bytes)
        self._largest = max(self._largest, other._largest)

    def at(self, number: float) -> float:
        """The curve, and beyond the largest number of any point its height there in proportion."""
        return self._at(number) * max(1.0, number / self._largest) if self._largest else 0.0

    def _at(self, number: float) -> float:
        corners = self._corners
        after = bisect_left(corners, (number,))
        if after == len(corners):
            return corners[-1][1]
        (left, low), (right, high) = corners[max(0, after - 1)], corners[after]
        return min(high, low + (number - left) * _slope((left, low), (right, high)))

    def _slope_after(self, corner: int) -> float:
        """Of the curve behind one of its corners."""
        corners = self._corners
        return _slope(corners[corner], corners[corner + 1]) if corner + 1 < len(corners) else 0.0


def _slope(left: Point, right: Point) -> float:
    """Of the line between two points, of which the second is lower where they have one number."""
    run = right[0] - left[0]
    return (right[1] - left[1]) / run if run else -math.inf
