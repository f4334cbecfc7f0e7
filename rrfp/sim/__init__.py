"""Simulation: the engine that drives the real core on virtual time, the lower bound, and the explorer."""
