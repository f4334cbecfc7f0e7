"""Gradients after the last task of a virtual stage: reduced over replicas, summed over ties, clipped."""
