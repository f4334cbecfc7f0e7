"""Hint policies: the priorities of ready tasks."""
