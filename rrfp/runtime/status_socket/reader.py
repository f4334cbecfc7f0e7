"""Reads the report of a process from its status socket."""

from __future__ import annotations

import os
import socket
import time

from rrfp.core import timeouts
from rrfp.errors import RrfpError
from rrfp.runtime.status_socket.credentials import user_at
from rrfp.runtime.status_socket.folder import SocketFile
from rrfp.runtime.status_socket.report import JobReport

#: A longer line is no report.
_MOST_BYTES = 1 << 26


def read_report(file: SocketFile) -> JobReport:
    """The report of the process at ``file``; takes `STATUS_S` at most.

    Raises:
        ConnectionError, FileNotFoundError: if no process listens there, or it ended meanwhile.
        TimeoutError: if it does not answer in time.
        RrfpError: if it belongs to another user, or the line cannot be read.
    """
    deadline = time.monotonic() + timeouts.STATUS_S
    with socket.socket(socket.AF_UNIX) as sock:
        _connect(sock, file, deadline)
        if (user := user_at(sock)) != os.geteuid():
            raise RrfpError(f"{file.path}: the process that listens there belongs to user {user}")
        line = bytearray()
        while not line.endswith(b"\n") and len(line) < _MOST_BYTES:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            received = sock.recv(1 << 16)
            if not received:
                raise ConnectionResetError
            line += received
    return JobReport.read(bytes(line))


def _connect(sock: socket.socket, file: SocketFile, deadline: float) -> None:
    while True:
        try:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock.connect(os.fspath(file.path))
            return
        except BlockingIOError:  # other programs look too
            if time.monotonic() >= deadline:
                raise TimeoutError from None
            time.sleep(timeouts.STATUS_PAUSE_S)
