"""Hint policies: how ready tasks are ranked."""
