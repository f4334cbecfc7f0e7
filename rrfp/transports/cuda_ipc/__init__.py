"""Tensors of a device, which the receiver copies out of the sender's memory: within a host, without the host's memory.

- `announcements`: how a message names the shared memory of its tensors.
- `pulls`: from announcements to whole messages; `sender`: shares, and waits for the acknowledgement.
- `link`: all that one peer needs; `pulled`: the transport between ranks that can do so.
- `trial`: whether two ranks can; `transport`: chooses for each peer.
"""
