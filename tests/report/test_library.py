"""The plotting library of the report: fetched by npm, checked, and said in one line where it is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli.shell import rrfp

from rrfp.lab.report import library


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the file that fetches it, in a folder without the library."""
    path = tmp_path / "report" / "library.py"
    path.parent.mkdir()
    path.write_text(Path(library.__file__).read_text())
    return path


def fetched(path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """With the programs of a folder alone."""
    environment = {**os.environ, "PATH": str(folder)}
    return subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, env=environment, timeout=50, check=False
    )


def npm(folder: Path, script: str) -> Path:
    """A folder with a stand-in for npm."""
    folder.mkdir()
    program = folder / "npm"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "npm, which fetches its plotting library, is not installed"),
        ("echo 'npm error network is down' >&2; exit 1", "could not be fetched (network is down)"),
        ("exit 3", "could not be fetched (npm pack ended with 3)"),
    ],
)
def test_what_keeps_it_from_being_fetched_is_one_line_and_no_failure(
    checkout: Path, tmp_path: Path, script: str | None, reason: str
) -> None:
    done = fetched(checkout, tmp_path if script is None else npm(tmp_path / "bin", script))
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("rrfp report is left out: ")
    assert reason in done.stderr


def test_the_file_says_that_the_library_is_here(checkout: Path, tmp_path: Path) -> None:
    if not library.PACKAGE.exists():
        pytest.skip(f"{library.NAME} {library.VERSION}, which make setup fetches with npm, is not here")
    programs = npm(tmp_path / "bin", f'/bin/cp {library.PACKAGE} "$4"')
    for _ in range(2):  # the second time it was here before
        done = fetched(checkout, programs)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"{library.NAME} {library.VERSION}, which rrfp report draws with, is here\n"


def test_another_file_than_the_pinned_one_is_refused(checkout: Path, tmp_path: Path) -> None:
    name = library.PACKAGE.name
    done = fetched(checkout, npm(tmp_path / "bin", f'echo changed > "$4/{name}"'))
    assert done.returncode == 0
    assert "its hash differs" in done.stderr
    assert not (checkout.parent / "package").exists()


def test_the_command_says_in_one_line_how_to_fetch_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PACKAGE", tmp_path / "absent.tgz")
    result = rrfp("report", tmp_path / "trace.json", "-o", tmp_path / "report.html")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"the report needs {library.NAME} {library.VERSION}, which make setup fetches with npm" in result.stderr
    (tmp_path / "absent.tgz").write_bytes(b"changed")
    assert "its hash differs" in rrfp("report", tmp_path / "trace.json", "-o", tmp_path / "report.html").stderr


def test_its_licence_is_in_it_and_it_is_small(plotting: None) -> None:
    script, style, license_text = library.read()
    assert "The MIT License" in license_text
    assert len(script) + len(style) + len(license_text) < 1_500_000
