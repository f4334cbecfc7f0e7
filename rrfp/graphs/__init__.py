"""Models whose parts form a graph: how a caller describes them, and what the description means. Pure."""
