"""The backend that fits a rank."""

from __future__ import annotations

import torch
from torch import distributed

from rrfp.errors import ConfigError
from rrfp.transports.base import TransportContext
from rrfp.transports.carried.wires import Backend
from rrfp.transports.collective.gloo import GlooBackend
from rrfp.transports.collective.nccl import NcclBackend
from rrfp.transports.rendezvous import in_thread
from rrfp.transports.zmq.endpoint import LOOPBACK, interface_towards_master

#: The kind of device between which tensors need not pass through host memory.
CUDA = "cuda"


async def choose_backend(context: TransportContext) -> Backend:
    """NCCL for a rank that computes on a CUDA device, otherwise gloo.

    Raises:
        ConfigError: in a job with a secret, without ``plain_data``; in one without, without ``allow_insecure``; or if
            the environment does not let NCCL work as edges need it.
    """
    address = await _address(context)
    copies = context.copies
    if copies is None or copies.kind != CUDA:
        return GlooBackend(context.rank, address)
    if not (distributed.is_available() and distributed.is_nccl_available()):
        raise ConfigError(
            "transport is 'collective', must be another one for modules on cuda: this torch has no NCCL; 'auto' copies "
            "tensors through host memory"
        )
    index = torch.cuda.current_device() if copies.index is None else copies.index
    return NcclBackend(context.rank, torch.device(CUDA, index))


async def _address(context: TransportContext) -> str:
    """The address of the interface on which edges listen: within a host too, any user of it may connect there."""
    address = LOOPBACK if context.single_host else await in_thread(interface_towards_master)
    if context.secret is not None and not context.plain_data:
        raise ConfigError(
            f"collective would move tensors in plain text over tcp at {address}, and the job has a secret; pass "
            "data='plain' if those who can read the network may read them, or choose transport 'auto'"
        )
    if context.secret is None and not context.allow_insecure:
        raise ConfigError(
            f"collective would use tcp at {address} without authentication; pass allow_insecure=True if the network "
            "and the host are yours alone, or choose transport 'auto'"
        )
    return address
