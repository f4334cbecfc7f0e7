"""Traces: spans, what they add up to, and how they are shown."""
