"""The secret that all ranks of a job share: a process that has it may be any rank, and no other process may be one."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from typing import NoReturn

from rrfp.errors import ConfigError, TransportError

#: The environment variables that hold it, or the path of its file.
VARIABLE, FILE_VARIABLE = "RRFP_SECRET", "RRFP_SECRET_FILE"

MIN_BYTES = 32

#: A longer file is none of a secret.
_MAX_BYTES = 4096

#: Values in the store that begin so have a voucher, and then the value itself.
_VOUCHED = b"rrfp vouched 1 "
_VOUCHER_BYTES = hashlib.sha256().digest_size


def new_secret() -> str:
    """A fresh one: 64 hexadecimal digits, 256 bits."""
    return secrets.token_hex(32)


class Secret:
    """A job's secret. It neither prints nor pickles itself.

    Args:
        value: at least `MIN_BYTES`.
        origin: where it comes from, for errors.

    Raises:
        ConfigError: if it is too short; the text has ``origin``, not the secret.
    """

    __slots__ = ("__value", "origin")

    def __init__(self, value: bytes, origin: str = "secret") -> None:
        if len(value) < MIN_BYTES:
            raise ConfigError(
                f"{origin} holds {len(value)} bytes, must hold at least {MIN_BYTES}; `rrfp secret` makes a secret"
            )
        self.__value = value
        self.origin = origin

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Secret | None:
        """Read RRFP_SECRET, or the file that RRFP_SECRET_FILE names; None where neither is set.

        White space around the secret does not count.

        Args:
            environ: the process's variables.

        Raises:
            ConfigError: if both are set, the secret is too short, or the file cannot be read, belongs to another user
                or may be read by others; names the variable, the file and its mode.
        """
        text, path = environ.get(VARIABLE), environ.get(FILE_VARIABLE)
        if text is not None and path is not None:
            raise ConfigError(f"{VARIABLE} and {FILE_VARIABLE} are set, only one may be")
        if path is not None:
            return cls(_read(path), f"{FILE_VARIABLE} {path!r}")
        return None if text is None else cls(text.strip().encode(errors="surrogateescape"), VARIABLE)

    def mac(self, *parts: str | int | bytes) -> bytes:
        """HMAC-SHA256 under this secret. Each part counts with its length, so no two sequences of parts are alike.

        Args:
            parts: the purpose first.
        """
        mac = hmac.new(self.__value, digestmod=hashlib.sha256)
        for part in parts:
            data = part if isinstance(part, bytes) else str(part).encode()
            mac.update(len(data).to_bytes(8, "big") + data)
        return mac.digest()

    def check(self, voucher: bytes, what: str, reader: str, *parts: str | int | bytes) -> None:
        """Check that ``voucher`` is the `mac` of ``parts``.

        Args:
            voucher: as it was found in the rendezvous store; may be empty.
            what: it is found with, for errors: "an endpoint of rank 1".
            reader: this rank, for errors.
            parts: as for `mac`.

        Raises:
            TransportError: if it is missing or another one; blames the store.
        """
        if not voucher:
            raise TransportError(
                f"the rendezvous store has {what} without a voucher: the rank has no secret (RRFP_SECRET_FILE on its "
                "host), or another program wrote to the store"
            )
        if not hmac.compare_digest(self.mac(*parts), voucher):
            raise TransportError(
                f"the rendezvous store has {what} that the secret of this job does not vouch for: the rank has another "
                f"secret than {reader}, or another program wrote to the store"
            )

    def __repr__(self) -> str:
        return f"<secret of {self.origin}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a job's secret cannot be pickled: every process reads it from its own environment")


def vouch(secret: Secret | None, value: bytes, *parts: str | int | bytes) -> bytes:
    """``value`` for the rendezvous store: with a voucher, given a secret."""
    return value if secret is None else _VOUCHED + secret.mac(*parts, value) + value


def split_voucher(data: bytes) -> tuple[bytes, bytes]:
    """The voucher, empty if there is none, and the value of what `vouch` made."""
    if not data.startswith(_VOUCHED):
        return b"", data
    start = len(_VOUCHED) + _VOUCHER_BYTES
    return data[len(_VOUCHED) : start], data[start:]


def vouched(secret: Secret | None, data: bytes, what: str, reader: str, *parts: str | int | bytes) -> bytes:
    """The value of what `vouch` made; ``what`` and ``reader`` as for `Secret.check`."""
    voucher, value = split_voucher(data)
    if secret is not None:
        secret.check(voucher, what, reader, *parts, value)
    elif voucher:
        raise TransportError(
            f"the rendezvous store has {what} with a voucher: the rank has a secret, and {reader} has none (set "
            "RRFP_SECRET_FILE on all hosts), or another program wrote to the store"
        )
    return value


def check_security(secret: Secret | None, *, allow_insecure: bool) -> None:
    """Refuse a secret together with ``allow_insecure``: a ConfigError that says which to drop."""
    if secret is not None and allow_insecure:
        raise ConfigError(
            f"allow_insecure is True although there is a {secret.origin.split()[0]}: leave allow_insecure out for "
            "authenticated and encrypted connections, or unset the variable for plain ones"
        )


def _read(path: str) -> bytes:
    try:
        # Without O_NONBLOCK a FIFO would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{FILE_VARIABLE} is {path!r}, which cannot be read: {error}") from error
    try:
        _check(path, os.fstat(descriptor))  # of the open file: the name may point elsewhere by now
        value = os.read(descriptor, _MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(value) > _MAX_BYTES:
        raise ConfigError(f"{FILE_VARIABLE} is {path!r} with more than {_MAX_BYTES} bytes, which is no secret")
    return value.strip()


def _check(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{FILE_VARIABLE} is {path!r}, which is no ordinary file")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"{FILE_VARIABLE} is {path!r}, which belongs to user {status.st_uid}, must belong to {os.geteuid()}"
        )
    if (mode := stat.S_IMODE(status.st_mode)) & 0o077:
        raise ConfigError(
            f"{FILE_VARIABLE} is {path!r} with mode {mode:04o}, which others may use; must have mode 0600: "
            f"chmod 600 {path}"
        )
