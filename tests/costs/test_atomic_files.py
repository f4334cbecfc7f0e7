"""A file is written whole, or what was there stays."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rrfp.atomic_files import write_atomically
from rrfp.errors import ConfigError


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_atomically(path, "first, and long")
    path.chmod(0o640)
    write_atomically(path, "sécond")
    assert path.read_text(encoding="utf-8") == "sécond"
    write_atomically(path, (piece for piece in ("thi", "rd")))
    assert path.read_text(encoding="utf-8") == "third"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["t.json"]


def test_what_was_there_stays_when_writing_fails_in_the_middle(tmp_path: Path) -> None:
    """The disk is full."""
    path = tmp_path / "t.json"
    path.write_text("before")

    def half() -> Iterator[str]:
        yield "after"
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match=r"t\.json: cannot be written \(No space left on device\)$"):
        write_atomically(path, half())
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["t.json"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    write_atomically(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_atomically(pipe, "through")
    reader.join()
    assert read == ["through"]


@pytest.mark.parametrize("name", ["missing/t.json", "."])
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_atomically(tmp_path / name, "x")
