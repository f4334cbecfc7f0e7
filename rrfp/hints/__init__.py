"""Hint policies: which ready task runs first."""
