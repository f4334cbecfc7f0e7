"""Tensors between devices of one host's processes, through a few slots of device memory that both have open."""
