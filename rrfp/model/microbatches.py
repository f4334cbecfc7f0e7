"""Microbatches of samples of different lengths, each within a budget of tokens or bytes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar, overload

from rrfp.errors import ConfigError
from rrfp.plain import flag, number, or_none, whole

T = TypeVar("T")

#: The largest microbatch may be this much larger than it had to be: evening out takes a few passes instead of dozens.
_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class Microbatches(Sequence[list[T]], Generic[T]):
    """The microbatches of a step, each a list of samples; made by `rrfp.microbatches`.

    Attributes:
        parts: the microbatches, in the order of their first samples.
        sizes: for ``step(sizes=)``: the cost of each.
        weights: for ``step(weights=)``: the sum of its samples' weights.
    """

    parts: tuple[list[T], ...]
    sizes: tuple[float, ...]
    weights: tuple[float, ...]

    @overload
    def __getitem__(self, index: int) -> list[T]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[list[T], ...]: ...
    def __getitem__(self, index: int | slice) -> list[T] | tuple[list[T], ...]:
        return self.parts[index]

    def __iter__(self) -> Iterator[list[T]]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def microbatches(
    samples: Sequence[T],
    *,
    cost: Callable[[T], float],
    weight: Callable[[T], float],
    budget: float | None = None,
    count: int | None = None,
    padded: bool = False,
) -> Microbatches[T]:
    """Form the microbatches of a step from samples of different lengths.

    As few as the budget allows, or as many as ``count`` says, and of costs as even as the samples allow. The result
    depends on the arguments alone, so ranks that pass equal costs get the same. It packs the largest samples first, by
    best fit, into the smallest capacity that does not take more microbatches (MULTIFIT: Coffman, Garey and Johnson,
    *An application of bin-packing to multiprocessor scheduling*, 1978).

    Args:
        samples: of one step, on this replica. Indices will do where only their lengths are known.
        cost: of a sample, above 0: its tokens, or the bytes that it makes a stage hold.
        weight: of a sample in the loss, at least 0. It must fit ``loss_fn``, which is the mean over a microbatch: the
            number of target tokens where it averages over tokens, 1 where it averages over samples.
        budget: the most that a microbatch may cost.
        count: how many microbatches to form, instead of ``budget`` or within it.
        padded: whether a microbatch is padded to its longest sample, so that it costs that sample's cost for each of
            its samples; otherwise the sum of their costs, as where they are packed.

    Returns:
        The microbatches, with their sizes and weights.

    Raises:
        ConfigError: if ``samples`` is no sequence, or has none or fewer than ``count``, a cost or weight is impossible,
            a sample is above the budget, or ``count`` microbatches do not fit it.
    """
    if isinstance(samples, Mapping) or not (hasattr(samples, "__getitem__") and hasattr(samples, "__len__")):
        raise ConfigError(f"samples is {samples!r:.100}, must be a list, or another sequence")
    flag("padded", padded)
    costs = _numbers("cost", cost, samples)
    weights = _numbers("weight", weight, samples)
    if not costs:
        raise ConfigError("samples is empty, must have one at least")
    budget = or_none(partial(number, above=0), "budget", budget)
    count = or_none(whole, "count", count, 1, len(costs))
    if budget is None and count is None:
        raise ConfigError("budget and count are both None, must be one of them or both")
    if budget is not None and max(costs) > budget:
        index = max(range(len(costs)), key=costs.__getitem__)
        raise ConfigError(f"budget is {budget:.10g}, must be at least the cost of sample {index}: {costs[index]:.10g}")
    groups = sorted(map(sorted, _groups(costs, budget, count, padded)))
    sizes = [_size([costs[index] for index in group], padded) for group in groups]
    if budget is not None and max(sizes) > budget:
        raise ConfigError(
            f"count is {count}, must be larger: so few microbatches do not fit the budget of {budget:.10g}, the "
            f"largest costs {max(sizes):.10g}"
        )
    return Microbatches(
        tuple([samples[index] for index in group] for group in groups),
        tuple(sizes),
        tuple(sum(weights[index] for index in group) for group in groups),
    )


def _groups(costs: Sequence[float], budget: float | None, count: int | None, padded: bool) -> list[list[int]]:
    def size(group: Sequence[int]) -> float:
        return _size([costs[index] for index in group], padded)

    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    found = [order] if budget is None else _filled(order, costs, budget, padded)
    most = len(found) if count is None else count
    if len(found) > most:
        found = [order]
    # Not less than `low` can hold them; `high` does.
    low, high = max(costs[order[0]], 0 if padded else sum(costs) / most), max(map(size, found))
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        tried = _filled(order, costs, middle, padded)
        if len(tried) <= most:
            found, high = tried, max(map(size, tried))
        else:
            low = middle
    while count is not None and len(found) < count:
        largest = max((group for group in found if len(group) > 1), key=size)
        found.remove(largest)
        found += [largest[::2], largest[1::2]]
    return found


def _filled(order: Sequence[int], costs: Sequence[float], capacity: float, padded: bool) -> list[list[int]]:
    """Groups of at most ``capacity``, from samples in descending order."""
    groups: list[list[int]] = []
    if padded:  # the longest sample says how many rows there are: the next longest fill them best
        start = 0
        while start < len(order):
            rows = max(1, int(capacity // costs[order[start]]))
            groups.append(list(order[start : start + rows]))
            start += rows
        return groups
    spaces: list[tuple[float, int]] = []  # what is left of each group, ascending
    for index in order:
        place = bisect_left(spaces, (costs[index], -1))
        left, group = spaces.pop(place) if place < len(spaces) else (capacity, len(groups))
        if group == len(groups):
            groups.append([])
        groups[group].append(index)
        insort(spaces, (left - costs[index], group))
    return groups


def _size(costs: Sequence[float], padded: bool) -> float:
    return max(costs) * len(costs) if padded else sum(costs)


def _numbers(name: str, function: Callable[[T], float], samples: Sequence[T]) -> list[float]:
    if not callable(function):
        raise ConfigError(f"{name} is {function!r}, must be a function of a sample")
    read = partial(number, above=0) if name == "cost" else partial(number, least=0)
    return [read(f"{name} of sample {index}", function(sample)) for index, sample in enumerate(samples)]
