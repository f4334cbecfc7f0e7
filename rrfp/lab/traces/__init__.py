"""Readers and pictures of traces."""
