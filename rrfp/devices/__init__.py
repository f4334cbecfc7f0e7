"""Accelerators: the operations on streams, events and memory that lanes, copies and checks need."""
