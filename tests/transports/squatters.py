"""A process of another user that listens where a rank should, in a process of its own."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import zmq


def serve(user: int, connection: Connection) -> list[str]:
    """Listen as ``user``, with keys of its own and with any password, until the test says something.

    Sends the two endpoints. Returns the names of the listeners that got a message.
    """
    os.setuid(user)
    sockets = zmq.Context()
    encrypted, plain = sockets.socket(zmq.ROUTER), sockets.socket(zmq.ROUTER)
    encrypted.curve_server = True
    encrypted.curve_publickey, encrypted.curve_secretkey = zmq.curve_keypair()
    plain.plain_server = True  # without a gate libzmq lets everybody in
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (encrypted, plain)]
    connection.send([f"tcp://127.0.0.1:{port}" for port in ports])
    connection.recv()
    got = [name for name, socket in (("encrypted", encrypted), ("plain", plain)) if socket.poll(0)]
    sockets.destroy(linger=0)
    return got
