"""Recorded steps to look at: `rrfp report`, and the timeline of a step in a notebook."""
