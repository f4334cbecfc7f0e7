"""The graphs that a schedule accepts: chains, by chunks, placement and split backward. It knows nothing of orders."""

from __future__ import annotations

from dataclasses import dataclass

from rrfp.core.graph import Graph
from rrfp.core.placement import Layout
from rrfp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Needs:
    """The properties of a graph that a schedule requires.

    Attributes:
        chunks: C; None: any.
        layout: the placement of two and more chunks (with one chunk all placements are the same); None: any.
        split: whether at least one virtual stage must have a split backward; not required by a schedule that places no
            weight tasks.
    """

    chunks: int | None = None
    layout: Layout | None = None
    split: bool = False

    def check(self, name: str, graph: Graph) -> None:
        """Refuse a graph that the schedule ``name`` does not accept: a ConfigError names what does not fit."""
        placement = graph.placement
        counts = {placement.chunks_of(stage) for stage in range(placement.stages)}
        if not graph.is_chain or len(counts) > 1:
            has = "branches" if not graph.is_chain else f"stages of {min(counts)} to {max(counts)} chunks"
            raise ConfigError(
                f"schedule {name} takes a chain with equally many chunks on each stage; the graph has {has}: choose "
                "another hint, or a schedule file made for it"
            )
        # (requirement, the graph's property, whether it fits)
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
            remedy = " (split=True splits it)" if "unsplit backward" in has else ""
            raise ConfigError(f"schedule {name} takes {takes}; the graph has {has}{remedy}")


def _count(chunks: int) -> str:
    return f"{chunks} chunk{'' if chunks == 1 else 's'} a stage"
