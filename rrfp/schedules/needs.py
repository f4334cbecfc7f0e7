"""What a schedule takes of a graph: chunks, placement, split backward. Knows nothing of orders."""

from __future__ import annotations

from dataclasses import dataclass

from rrfp.core.graph import Graph
from rrfp.core.topology import Layout
from rrfp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Needs:
    """What a graph must be like for a schedule to be made for it.

    Attributes:
        chunks: C; None: any.
        layout: the placement of two and more chunks (with one chunk all placements are the same); None: any.
        split: at least one virtual stage must have a split backward; a schedule that places no weight tasks itself
            takes any.
    """

    chunks: int | None = None
    layout: Layout | None = None
    split: bool = False

    def check(self, name: str, graph: Graph) -> None:
        """Refuse a graph for which the schedule ``name`` is not made.

        Raises:
            ConfigError: in one line, what the schedule takes and what the graph has instead.
        """
        placement = graph.placement
        # (what it takes, what there is, whether that will do)
        demands = []
        if self.chunks is not None:
            demands.append((_count(self.chunks), _count(placement.chunks), placement.chunks == self.chunks))
        if self.layout is not None:
            fits = placement.chunks == 1 or placement.layout == self.layout
            demands.append((f"{self.layout} placement", f"{placement.layout} placement", fits))
        if self.split:
            demands.append(("split backward", "unsplit backward", any(graph.split)))
        if not all(fits for _, _, fits in demands):
            takes = ", ".join(takes for takes, _, _ in demands)
            has = ", ".join(has for _, has, fits in demands if not fits)
            raise ConfigError(f"schedule {name} takes {takes}; the graph has {has}")


def _count(chunks: int) -> str:
    return f"{chunks} chunk{'' if chunks == 1 else 's'} a stage"
