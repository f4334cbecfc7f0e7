"""The backend that fits a rank."""

from __future__ import annotations

import ipaddress

from rrfp.errors import ConfigError
from rrfp.transports.base import TransportContext
from rrfp.transports.collective.gloo import GlooBackend
from rrfp.transports.collective.wires import Backend
from rrfp.transports.rendezvous import in_thread
from rrfp.transports.zmq.endpoint import LOOPBACK, interface_towards_master


async def choose_backend(context: TransportContext) -> Backend:
    """gloo.

    Raises:
        ConfigError: if the edges would leave this host without ``allow_insecure``.
    """
    address = LOOPBACK if context.single_host else await in_thread(interface_towards_master)
    if not ipaddress.ip_address(address).is_loopback and not context.allow_insecure:
        raise ConfigError(
            f"collective would listen on {address}, which other machines can reach and nothing authenticates; "
            "pass allow_insecure=True if the network is yours alone"
        )
    return GlooBackend(context.rank, address)
