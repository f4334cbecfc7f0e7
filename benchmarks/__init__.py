"""Benchmarks, a folder each: ``python benchmarks/NAME/run.py``."""
