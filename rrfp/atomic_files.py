"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rrfp.errors import ConfigError


def write_atomically(path: str | os.PathLike[str], text: str | Iterable[str]) -> None:
    """Replace the file at ``path`` by one with ``text`` in UTF-8; if that fails, the old file stays.

    A path that is no ordinary file, such as a pipe, is written to directly; the pieces of a long text are written as
    they come. A ConfigError names the file that cannot be written and the reason.
    """
    if "\0" in os.fspath(path):
        raise ConfigError(f"{os.fspath(path)!r}: cannot be written (embedded null character)")
    target = Path(path).resolve()  # a link stays; the file that it points to is replaced
    beside = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}")
    try:
        if target.exists() and not target.is_file():
            _write(target, text)
            return
        try:
            _write(beside, text)
            if target.exists():
                shutil.copymode(target, beside)
            os.replace(beside, target)
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)}: cannot be written ({error.strerror or error})") from None


def _write(path: Path, text: str | Iterable[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines((text,) if isinstance(text, str) else text)
