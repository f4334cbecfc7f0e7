"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rrfp.errors import ConfigError
from rrfp.plain import path_of


def write_atomically(path: str | os.PathLike[str], content: str | bytes | Iterable[str]) -> None:
    """Replace the file at ``path`` by one with ``content``, text in UTF-8; if that fails, the old file stays.

    A path that is no ordinary file, such as a pipe, is written to directly; the pieces of a long text are written as
    they come. A ConfigError names the file that cannot be written and the reason.
    """
    target = path_of("path", path).resolve()  # a link stays; the file that it points to is replaced
    beside = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}")
    try:
        if target.exists() and not target.is_file():
            _write(target, content)
            return
        try:
            _write(beside, content)
            if target.exists():
                shutil.copymode(target, beside)
            os.replace(beside, target)
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)}: cannot be written ({error.strerror or error})") from None


def _write(path: Path, content: str | bytes | Iterable[str]) -> None:
    pieces = (content,) if isinstance(content, str | bytes) else content
    with path.open("wb") as file:
        file.writelines(piece if isinstance(piece, bytes) else piece.encode() for piece in pieces)
