"""Transports by name: our own, imported when asked for, and plugins of the entry point group ``rrfp.transports``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from rrfp.errors import ConfigError
from rrfp.transports.base import Transport, TransportContext

#: What a caller may pass as a transport: a name, or a Transport subclass or other factory.
TransportSpec = str | Callable[[TransportContext], Transport]

_GROUP = "rrfp.transports"
_BUILT_IN = {
    "inproc": ("rrfp.transports.inproc", "InprocTransport"),
    "zmq": ("rrfp.transports.zmq.transport", "ZmqTransport"),
    "simulated": ("rrfp.transports.simulated", "SimulatedTransport"),
}


def transport_names() -> tuple[str, ...]:
    """Every name that `create_transport` takes: built in, then plugins."""
    plugins = {point.name for point in entry_points(group=_GROUP)} - set(_BUILT_IN)
    return (*_BUILT_IN, *sorted(plugins))


def create_transport(spec: TransportSpec, context: TransportContext) -> Transport:
    """One rank's transport, not started.

    Raises:
        ConfigError: for an unknown name, or something that does not make a Transport.
    """
    factory = transport_factory(spec) if isinstance(spec, str) else spec
    if not callable(factory):
        raise ConfigError(f"transport is {spec!r}, must be a name or a factory; names: {', '.join(transport_names())}")
    transport = factory(context)
    if not isinstance(transport, Transport):
        raise ConfigError(f"transport {spec!r} made a {type(transport).__name__}, must make an rrfp Transport")
    return transport


def transport_factory(name: str) -> Any:
    """What makes the transport ``name``: a Transport subclass, or any other callable.

    Raises:
        ConfigError: for an unknown name.
    """
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name]
        return getattr(import_module(module), attribute)
    for point in entry_points(group=_GROUP):
        if point.name == name:
            return point.load()
    raise ConfigError(f"transport is {name!r}, must be one of: {', '.join(transport_names())}")
