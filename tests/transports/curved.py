"""Ranks over encrypted tcp on loopback, in any process."""

from __future__ import annotations

from dataclasses import replace

from rrfp.transports.base import TransportContext
from rrfp.transports.secret import Secret
from rrfp.transports.zmq.transport import ZmqTransport

SECRET = Secret(b"a secret that all ranks of the tests share")


def curve(context: TransportContext) -> ZmqTransport:
    """A transport's factory."""
    return ZmqTransport(replace(context, secret=SECRET), "127.0.0.1")


def over_plain_tcp(context: TransportContext) -> ZmqTransport:
    """A transport's factory; the job has to allow it."""
    return ZmqTransport(context, "127.0.0.1")
