"""Two ranks that exchange tensors through torch's function for P2P operations, while it is emulated: one kind of RECV.

Rank 1 sends after rank 0 has gone on, except where a RECV occupies rank 0, which then could not go on.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from benchmarks.integrations.receives import emulated
from benchmarks.integrations.settings import Receives

receives = Receives(sys.argv[1])
original = schedules._batch_p2p
dist.init_process_group("gloo")
late, token, marker = torch.zeros(1), torch.zeros(1), torch.zeros(1)
if dist.get_rank() == 0:
    with emulated(receives):
        received = schedules._batch_p2p([dist.P2POp(dist.irecv, late, 1)])
        if receives is Receives.OCCUPIED:
            assert (received, late.item()) == ([], 1)
        sent = schedules._batch_p2p([dist.P2POp(dist.isend, token + 2, 1)])
        assert schedules._batch_p2p([]) == []
        dist.send(marker, 1, tag=1)  # behind the token, if that was sent
        for work in (*received, *sent):
            work.wait()
    assert late.item() == 1
    assert schedules._batch_p2p is original
else:
    arrival = dist.irecv(token, 0)
    assert arrival is not None
    if receives is not Receives.OCCUPIED:
        dist.recv(marker, 0, tag=1)
    if receives is Receives.POSTED:  # no other RECV would ever complete
        arrival.wait()
    assert token.item() == (2 if receives is Receives.POSTED else 0)
    dist.send(late + 1, 0)
    if receives is not Receives.POSTED:
        arrival.wait()
    if receives is Receives.OCCUPIED:
        dist.recv(marker, 0, tag=1)
    assert token.item() == 2
dist.barrier()
dist.destroy_process_group()
