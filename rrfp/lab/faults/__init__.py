"""Seeded runs of real cores with faults, each judged by a checker that works from the contracts alone."""
