"""Tensors over collective communication libraries: gloo in host memory, NCCL between GPUs.

- `announcements`: how a message names the tensors that follow it over an edge.
- `wires`: the interface of backends; `gloo` and `nccl` implement it, `streams` is what devices share,
  `threads` what all do.
- `edges`: wires whose transfers are futures, and how ranks make them; `store` is how they meet.
- `arrivals`: from announcements to whole messages, in order.
- `link`: all that one peer needs; `transport`: the transport.
"""
