"""How the connections of a rank are protected, and what it publishes so that its peers can connect.

- Over ipc the kernel tells the user at the other end, and nothing more is needed.
- Over tcp with a secret, connections are encrypted and authenticated with CURVE. Each rank makes a key pair and
  publishes its endpoint and public key with an HMAC of the job's secret, the voucher. A peer uses neither without a
  good voucher. So the store may hold anything: it can keep ranks apart, and not pose as one.
- Tensors may go plain on request (`plain_data`): over a listener of their own, with a password that follows from the
  secret. It keeps out all but those who can read the connection.
- Over tcp with ``allow_insecure`` connections are plain, with a password that is published in the store. It keeps out
  all but those who can read the store or the connection.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

import zmq
from zmq.utils import z85

from rrfp.errors import ConfigError, TransportError
from rrfp.transports.base import Channel, TransportContext
from rrfp.transports.secret import vouch, vouched
from rrfp.transports.zmq.gate import Gate, guard

_KEY_BYTES = 32

#: At most so many bytes are added to a part that CURVE encrypts: a name, a nonce, a code of authenticity and flags.
CURVE_BYTES = 64

#: Of what a rank publishes.
_NUM_FIELDS = 3

#: Purposes of HMACs, so that none serves for another.
_VOUCHER, _PASSWORD = "rrfp zmq endpoint 2", "rrfp zmq data 1"

#: Channels by listener: of one listener for all, and of one for each kind.
ALL_CHANNELS: tuple[Channel, ...] = tuple(Channel)
DATA_CHANNELS: tuple[Channel, ...] = (Channel.FORWARD, Channel.BACKWARD)


class Published(NamedTuple):
    """What a rank publishes, as text with blanks between the fields."""

    #: Of all channels, or of control alone.
    endpoint: str
    #: Of the other channels, where it is another one.
    data_endpoint: str = ""
    #: Its CURVE public key with a secret; else the password of plain connections to it.
    key: bytes = b""

    def pack(self) -> bytes:
        fields = [self.endpoint, self.data_endpoint, self.key.hex()]
        return " ".join(field or "-" for field in fields).removesuffix(" - -").encode()

    @classmethod
    def unpack(cls, value: bytes) -> Published:
        """From bytes; a ValueError if they are malformed."""
        fields = ["" if field == "-" else field for field in value.decode().split(" ")]
        if len(fields) not in (1, _NUM_FIELDS):
            raise ValueError(f"must have 1 or {_NUM_FIELDS} fields")
        endpoint, data_endpoint, key = fields if len(fields) == _NUM_FIELDS else (*fields, "", "")
        for each in (endpoint, data_endpoint or endpoint):
            if not each.startswith(("tcp://", "ipc://")):
                raise ValueError("must be an endpoint of tcp or ipc")
        return cls(endpoint, data_endpoint, bytes.fromhex(key))

    @property
    def is_tcp(self) -> bool:
        return self.endpoint.startswith("tcp://")


class Security:
    """Protects the connections of one rank."""

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._secret = context.secret
        self._password = secrets.token_bytes(_KEY_BYTES)
        self._public = self._private = b""
        if context.secret is not None:
            if not zmq.has("curve"):
                raise ConfigError(
                    "there is a secret, but this libzmq is built without CURVE; the wheels of pyzmq have it"
                )
            self._public, self._private = zmq.curve_keypair()

    @property
    def listeners(self) -> tuple[tuple[Channel, ...], ...]:
        """The channels of each listener over tcp."""
        if self._secret is not None and self._context.plain_data:
            return ((Channel.CONTROL,), DATA_CHANNELS)
        return (ALL_CHANNELS,)

    def protect_listener(self, listener: zmq.Socket[bytes], channels: tuple[Channel, ...]) -> None:
        """Have a tcp listener refuse all but the peers."""
        guard(listener)
        if self._secret is None or channels == DATA_CHANNELS:
            listener.setsockopt(zmq.PLAIN_SERVER, 1)
        else:
            listener.setsockopt(zmq.CURVE_SERVER, 1)
            listener.setsockopt(zmq.CURVE_SECRETKEY, self._private)

    def admit_passwords(self, gate: Gate) -> None:
        own, key = self._context.rank, self._key
        for peer in self._context.peers:
            gate.admit_password(peer, self._password_between(peer, own, key))

    @property
    def _key(self) -> bytes:
        return self._password if self._secret is None else z85.decode(self._public)

    def _password_between(self, client: int, server: int, key: bytes) -> bytes:
        """Of ``client`` at the plain listener of ``server``, which published ``key``."""
        context = self._context
        if self._secret is None:
            return key.hex().encode()
        return self._secret.mac(_PASSWORD, context.run_id, context.restart, client, server, key).hex().encode()

    def publish(self, endpoints: list[str]) -> bytes:
        """What this rank publishes; ``endpoints`` are those of its listeners."""
        published = Published(endpoints[0], "".join(endpoints[1:]))
        if self._secret is not None or published.is_tcp:
            published = published._replace(key=self._key)
        return vouch(self._secret, published.pack(), *self._about(self._context.rank))

    def _about(self, rank: int) -> tuple[str | int, ...]:
        """What the voucher of ``rank`` is about, beside what it published."""
        return _VOUCHER, self._context.run_id, self._context.restart, rank

    def check(self, peer: int, data: bytes) -> Published:
        """What ``peer`` published, if it is the peer's and fits."""
        what, reader = f"an endpoint of rank {peer}", f"rank {self._context.rank}"
        value = vouched(self._secret, data, what, reader, *self._about(peer))
        try:
            published = Published.unpack(value)
        except ValueError as error:
            raise TransportError(
                f"cannot connect to {value!r:.200}, which rank {peer} or another program wrote to the store: {error}"
            ) from error
        if published.is_tcp:
            check_plain_tcp(self._context, published.endpoint)
            if self._secret is not None and bool(published.data_endpoint) != self._context.plain_data:
                takes = "plain" if published.data_endpoint else "encrypted"
                raise TransportError(f"rank {peer} takes tensors {takes}: data must be the same on all ranks")
        return published

    def admit(self, peer: int, published: Published, gate: Gate) -> None:
        """Admit the connections of a peer whose voucher is good."""
        if self._secret is not None:
            gate.admit_key(peer, published.key)

    def protect_outlet(self, socket: zmq.Socket[bytes], peer: int, published: Published, channel: Channel) -> str:
        """Prepare a socket for its connection to ``peer``; returns the endpoint."""
        is_data = bool(published.data_endpoint) and channel in DATA_CHANNELS
        endpoint = published.data_endpoint if is_data else published.endpoint
        if not published.is_tcp:
            return endpoint
        if self._secret is None or is_data:
            rank = self._context.rank
            socket.setsockopt(zmq.PLAIN_USERNAME, str(rank).encode())
            socket.setsockopt(zmq.PLAIN_PASSWORD, self._password_between(rank, peer, published.key))
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(published.key))
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._private)
        return endpoint


def check_plain_tcp(context: TransportContext, address: str) -> None:
    """Refuse tcp at ``address`` where there is neither a secret nor ``allow_insecure``: a ConfigError."""
    if context.secret is None and not context.allow_insecure:
        raise ConfigError(
            f"zmq would use tcp at {address} without authentication: make a secret with `rrfp secret` and set "
            "RRFP_SECRET_FILE on all hosts, or pass allow_insecure=True if the network is yours alone"
        )
