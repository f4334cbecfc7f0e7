"""Schedules: one generator a file, and their exchange as CSV."""
