"""The explorer: every reachable state of a small pipeline."""
