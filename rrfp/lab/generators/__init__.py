"""Generators of cost tables: seeded workloads, jitter and latencies."""

#: The name of the profile whose parts form a graph.
MULTIMODAL = "multimodal"

#: The share of its microbatches that have an image, and a sound, where none is given.
IMAGES, SOUNDS = 0.6, 0.4
