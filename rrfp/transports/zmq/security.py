"""How the connections of a rank are protected, and what it publishes so that its peers can connect.

- Over ipc the kernel tells the user at the other end, and nothing more is needed.
- Over tcp with a secret, connections are encrypted and authenticated with CURVE. Each rank makes a key pair and
  publishes its endpoint and public key with an HMAC of the job's secret, the voucher. A peer uses neither without a
  good voucher. So the store may hold anything: it can keep ranks apart, and not pose as one.
- Tensors may go plain on request (`plain_data`): over a listener of their own, with a password that follows from the
  secret. It keeps out all but those who can read the connection.
- Over tcp with ``allow_insecure`` connections are plain, with a password that is published in the store. It keeps out
  all but those who can read the store or the connection.

libzmq asks before it reads anything else of a connection (ZAP, https://rfc.zeromq.org/spec/27), and a gate answers. So
of an unauthenticated sender nothing is stored, and every frame that arrives carries the rank that was authenticated, as
its User-Id. A zmq context has one such handler.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq
from zmq.utils import z85

from rrfp.errors import ConfigError, TransportError
from rrfp.transports.base import Channel, TransportContext
from rrfp.transports.secret import vouch, vouched

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

_ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN = b"rrfp"
_NOBLOCK = int(zmq.NOBLOCK)

_ACCEPTED, _REFUSED = b"200", b"400"

#: Connections with unknown keys that wait until all peers' keys are known: libzmq lets no refused one try again.
_MAX_WAITING = 1024


class _Request(NamedTuple):
    """libzmq's question about one connection; ``envelope`` leads the answer back."""

    envelope: list[bytes]
    address: bytes
    mechanism: bytes
    credentials: list[bytes]


class Gate:
    """libzmq's authentication handler. Create it before a listener binds."""

    def __init__(self, sockets: zmq.Context[zmq.Socket[bytes]], on_rejected: Callable[[str], None]) -> None:
        self._on_rejected = on_rejected
        self._keys: dict[bytes, int] = {}
        self._passwords: dict[bytes, tuple[int, bytes]] = {}
        self._knows_all = False
        self._waiting: list[_Request] = []
        self._loop = asyncio.get_running_loop()
        self._socket = sockets.socket(zmq.ROUTER)  # not REP: some answers come later
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._closed = False
        self._loop.add_reader(self._fd, self._answer_all)

    def admit_key(self, rank: int, key: bytes) -> None:
        """Connections with this CURVE public key, 32 bytes, are those of ``rank``."""
        self._keys[key] = rank
        self._answer_waiting()

    def admit_password(self, rank: int, password: bytes) -> None:
        self._passwords[str(rank).encode()] = (rank, password)

    def close_list(self) -> None:
        """All peers' keys are admitted; unknown ones are refused from now on."""
        self._knows_all = True
        self._answer_waiting()

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._decide(request)
        # A send takes in what has arrived, too: the descriptor does not fire again for a request that came meanwhile.
        self._answer_all()

    def _answer_all(self) -> None:
        while not self._closed:
            try:
                parts = self._socket.recv_multipart(_NOBLOCK)
            except zmq.Again:  # the descriptor is edge-triggered: so everything was read
                return
            # Routing id, empty delimiter, version, request, domain, address, identity, mechanism, credentials.
            self._decide(_Request(parts[:4], parts[5], parts[7], parts[8:]))

    def _decide(self, request: _Request) -> None:
        rank = self._rank_of(request.mechanism, request.credentials)
        if rank is not None:
            self._answer(request, _ACCEPTED, str(rank).encode())
        elif request.mechanism == b"CURVE" and not self._knows_all and len(self._waiting) < _MAX_WAITING:
            self._waiting.append(request)
        else:
            self._answer(request, _REFUSED, b"")
            self._on_rejected(f"refused a connection from {request.address!r:.60} without a rank's key or password")

    def _answer(self, request: _Request, status: bytes, name: bytes) -> None:
        self._socket.send_multipart([*request.envelope, status, b"", name, b""], _NOBLOCK)

    def _rank_of(self, mechanism: bytes, credentials: Sequence[bytes]) -> int | None:
        if mechanism == b"CURVE" and len(credentials) == 1:
            return self._keys.get(credentials[0])
        if mechanism == b"PLAIN" and len(credentials) == 2:
            rank, password = self._passwords.get(credentials[0], (None, b""))
            return rank if hmac.compare_digest(password, credentials[1]) else None
        return None

    def close(self) -> None:
        """Answer no more. May be called twice."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)


def guard(listener: zmq.Socket[bytes]) -> None:
    """Have libzmq ask the gate about every connection to ``listener``."""
    listener.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    listener.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def authenticated_rank(frame: zmq.Frame) -> int | None:
    """The rank whose connection brought a frame; None if no gate let it in."""
    try:
        return int(frame.get("User-Id"))
    except (zmq.ZMQError, ValueError):
        return None


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
