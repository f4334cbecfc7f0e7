"""Tensors over collective communication libraries: NCCL, by a process group of two ranks for each direction."""
