"""A text file that grows by whole rows, over several runs."""

from __future__ import annotations

import os
from pathlib import Path

from rrfp.errors import ConfigError, RrfpError
from rrfp.log import get_logger

logger = get_logger(__name__)

#: No row is longer.
_TAIL_BYTES = 1 << 20


class RowFile:
    """Appends rows to ``path``.

    A row is written whole or not at all; the remains of one that a killed process left at the end are cut off. They
    begin with ``start``: any other unfinished line is the caller's own, and refused. ``head`` is the first line.
    """

    def __init__(self, path: str | os.PathLike[str], start: str = "", head: str = "") -> None:
        self.path = Path(path)
        self.head = head
        self._start = start.encode()
        self._descriptor: int | None = None

    def check(self) -> None:
        """Raise a ConfigError if the file cannot be written, or is another one's."""
        if self.path.is_dir() or not self.path.absolute().parent.is_dir():
            raise ConfigError(f"{self.path} must be a file in a folder that exists")
        if not os.access(self.path if self.path.exists() else self.path.absolute().parent, os.W_OK):
            raise ConfigError(f"{self.path} cannot be written: permission denied")
        self._whole_bytes()
        if not self._is_empty() and self.head:
            with self.path.open(encoding="utf-8", errors="replace") as file:
                first = file.readline()
            if first != f"{self.head}\n" and not (self.head.startswith(first) and not first.endswith("\n")):
                raise ConfigError(
                    f"{self.path} has other columns than this run, such as those of another number of stages: choose "
                    "another file"
                )

    def append(self, row: str) -> None:
        """Write one row.

        Raises:
            RrfpError: naming the file, if it cannot be written; nothing of the row is in it then.
        """
        try:
            if self._descriptor is None:
                self._descriptor = self._open()
            self._write(self._descriptor, row)
        except OSError as error:
            raise RrfpError(f"a row for {self.path} is lost: {error.strerror}") from error

    def close(self) -> None:
        """End; a later `append` opens the file again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _is_empty(self) -> bool:
        return not self.path.exists() or not self.path.stat().st_size

    def _open(self) -> int:
        whole = self._whole_bytes()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            if whole < os.fstat(descriptor).st_size:
                logger.warning("%s ended in the middle of a row, which is cut off", self.path)
                os.ftruncate(descriptor, whole)
            if self.head and not whole:
                self._write(descriptor, self.head)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _whole_bytes(self) -> int:
        """The bytes of the rows that are whole; a ConfigError if no row of this kind follows them."""
        if not self.path.is_file() or self._is_empty():
            return 0
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            tail = file.read()
        remains = tail[tail.rfind(b"\n") + 1 :]
        begins = remains.startswith(self._start) or self._start.startswith(remains)
        if remains and not begins and not (len(remains) == size and self.head.encode().startswith(remains)):
            raise ConfigError(f"{self.path} does not end with a row of a run: choose another file")
        return size - len(remains)

    @staticmethod
    def _write(descriptor: int, row: str) -> None:
        data, before = f"{row}\n".encode(), os.fstat(descriptor).st_size
        if os.write(descriptor, data) < len(data):
            os.ftruncate(descriptor, before)
            raise OSError(0, "the disk is full")
