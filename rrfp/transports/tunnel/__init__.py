"""Tensors beside a base transport, which announces them, or through it by way of host memory."""
