"""The page of a report: one file with its data, code and style, that asks for nothing from elsewhere."""

from __future__ import annotations

import base64
import gzip
import html
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rrfp.atomic_files import write_atomically
from rrfp.errors import ConfigError
from rrfp.lab.report import library
from rrfp.lab.report.data import EVERYTHING, ReportOptions, report_data
from rrfp.version import __version__

_FOLDER = Path(__file__).parent


def write_report(
    paths: Sequence[str],
    out: str | os.PathLike[str],
    options: ReportOptions = EVERYTHING,
    replayed: Callable[[], object] = lambda: None,
) -> None:
    """Write the page of one or two traces; ``replayed`` is called after each replay of a step for their advice."""
    parts = _library()
    write_atomically(out, page(report_data(paths, options, replayed), parts))


def require_library() -> None:
    _library()


def _library() -> tuple[str, str, str]:
    try:
        return library.read()
    except library.MissingLibraryError as error:
        raise ConfigError(str(error)) from None


def page(data: dict[str, Any], parts: tuple[str, str, str]) -> str:
    """The text of the page; ``parts`` are script, style sheet and licence of the library."""
    script, style, license_text = parts
    title = " and ".join(f"{run['file']}: {run['name']}" for run in data["runs"])
    packed = gzip.compress(json.dumps(data, separators=(",", ":"), allow_nan=False).encode(), mtime=0)
    values = {
        "TITLE": html.escape(title),
        "VERSION": html.escape(__version__),
        "LIBRARY": html.escape(f"{library.NAME} {library.VERSION}"),
        "LIBRARY_LICENSE": html.escape(license_text),
        "LIBRARY_STYLE": style,
        "LIBRARY_SCRIPT": script,
        "STYLE": _own("report.css"),
        "SCRIPT": _own("report.js"),
        "DATA": base64.b64encode(packed).decode(),
    }
    pieces = _own("report.html").split("{{")
    return pieces[0] + "".join(values[name] + rest for name, rest in (piece.split("}}", 1) for piece in pieces[1:]))


def _own(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
