"""Generators of cost tables: seeded workloads, jitter and latencies."""
