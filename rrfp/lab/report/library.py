"""The plotting library of the report: uPlot's package from npm, fetched once, checked, and never changed.

`make setup` and the build of a wheel run this file, by itself: it imports nothing of rrfp.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

NAME, VERSION = "uplot", "1.6.32"
#: Of the package's file, as package-lock.json has it.
INTEGRITY = "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw=="
#: Where it is: in a checkout not part of the repository, in a wheel beside this file too.
PACKAGE = Path(__file__).parent / "package" / f"{NAME}-{VERSION}.tgz"
#: What the page has of it.
SCRIPT, STYLE, LICENSE = "dist/uPlot.iife.min.js", "dist/uPlot.min.css", "LICENSE"

_FETCH_S = 120


class MissingLibraryError(Exception):
    """The library is not here, and why."""


def read() -> tuple[str, str, str]:
    """Script, style sheet and licence."""
    try:
        content = PACKAGE.read_bytes()
    except OSError:
        raise MissingLibraryError(
            f"the report needs {NAME} {VERSION}, which make setup fetches with npm; to fetch it now: "
            f"{Path(sys.executable).name} -m rrfp.lab.report.library"
        ) from None
    _check(content)
    with tarfile.open(fileobj=io.BytesIO(content)) as package:
        return _text(package, SCRIPT), _text(package, STYLE), _text(package, LICENSE)


def _text(package: tarfile.TarFile, name: str) -> str:
    file = package.extractfile(f"package/{name}")
    assert file is not None
    return file.read().decode()


def _check(content: bytes) -> None:
    digest = base64.b64encode(hashlib.sha512(content).digest()).decode()
    if f"sha512-{digest}" != INTEGRITY:
        raise MissingLibraryError(
            f"{PACKAGE}: is not {NAME} {VERSION} (its hash differs): remove it, and fetch it anew"
        )


def fetch() -> None:
    """Fetch it with npm, unless it is here."""
    if PACKAGE.exists():
        _check(PACKAGE.read_bytes())
        return
    npm = shutil.which("npm")
    if npm is None:
        raise MissingLibraryError("rrfp report is left out: npm, which fetches its plotting library, is not installed")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            npm,
            "pack",
            f"{NAME}@{VERSION}",
            "--pack-destination",
            folder,
            "--ignore-scripts",
            "--fetch-retries=1",
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_FETCH_S, check=False, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise MissingLibraryError(f"rrfp report is left out: npm did not answer within {_FETCH_S} s") from None
        packed = Path(folder, PACKAGE.name)
        if done.returncode or not packed.exists():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            reason = lines[0].removeprefix("npm error ") if lines else f"npm pack ended with {done.returncode}"
            raise MissingLibraryError(f"rrfp report is left out: {NAME} {VERSION} could not be fetched ({reason})")
        content = packed.read_bytes()
    _check(content)
    PACKAGE.parent.mkdir(exist_ok=True)
    beside = PACKAGE.with_name(f"{PACKAGE.name}.{os.getpid()}")
    beside.write_bytes(content)
    os.replace(beside, PACKAGE)


def main() -> None:
    """Fetch it, or say in one line why not; neither is a failure of the set-up."""
    try:
        fetch()
        sys.stdout.write(f"{NAME} {VERSION}, which rrfp report draws with, is here\n")
    except MissingLibraryError as error:
        sys.stderr.write(f"{error}\n")


if __name__ == "__main__":
    main()
