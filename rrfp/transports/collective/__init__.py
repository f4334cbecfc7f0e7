"""Tensors over collective communication libraries: gloo in host memory, NCCL between GPUs.

- `backends`: the backends of a rank; `gloo` and `nccl` make wires, `streams` is what devices share, `threads` what all
  do.
- `edges`: how ranks make edges of wires; `store` is how they meet.
- `transport`: the transport, over a carrier.
"""
