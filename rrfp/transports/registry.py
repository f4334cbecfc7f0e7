"""Transports by name: built in, or plugins of the entry point group ``rrfp.transports``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rrfp.errors import ConfigError
from rrfp.plugins import Registry, made
from rrfp.transports.base import Transport, TransportContext

#: Makes one rank's transport: a Transport subclass, or any other callable.
TransportFactory = Callable[[TransportContext], Transport]

#: The ``transport`` option: a name or a factory.
TransportSpec = str | TransportFactory

TRANSPORTS: Registry[TransportFactory] = Registry(
    "transport",
    "rrfp.transports",
    {
        "auto": "rrfp.transports.auto:auto_transport",
        "inproc": "rrfp.transports.inproc:InprocTransport",
        "shm": "rrfp.transports.shm.transport:ShmTransport",
        "zmq": "rrfp.transports.zmq.transport:ZmqTransport",
        "cuda_ipc": "rrfp.transports.cuda_ipc.transport:CudaIpcTransport",
        "collective": "rrfp.transports.collective.transport:CollectiveTransport",
    },
)


def allowed_transports() -> str:
    """What the option may be, for errors."""
    return f"a factory or one of: {', '.join(TRANSPORTS.names())}"


def create_transport(spec: TransportSpec, context: TransportContext) -> Transport:
    """One rank's transport, not started.

    Args:
        spec: a name of `TRANSPORTS`, or a factory.
        context: the factory's argument.

    Raises:
        ConfigError: for an unknown name, or something that does not make a Transport.
    """
    factory: Any = TRANSPORTS.load(spec) if isinstance(spec, str) else spec
    if not callable(factory):
        raise ConfigError(f"transport is {spec!r}, must be {allowed_transports()}")
    return made(Transport, f"transport {spec!r}", factory, context)  # type: ignore[type-abstract]
