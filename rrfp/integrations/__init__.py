"""RRFP inside the frameworks that its users already have: one package for each, imported when it is used.

They use public names of RRFP only. The layers in pyproject.toml let no other part of RRFP import them.
"""
