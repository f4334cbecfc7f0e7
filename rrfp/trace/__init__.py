"""Traces: spans, the breakdown of a step's time, and their display."""
