"""A cost file is written whole, or what was there stays."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from rrfp.costs import make_costs, read_costs, to_json, write_costs
from rrfp.errors import ConfigError

LONG, SHORT = make_costs("llm", 4, 40), make_costs("llm", 2, 1)


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_costs(path, LONG)
    path.chmod(0o640)
    write_costs(path, SHORT)
    assert read_costs(path) == SHORT
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["t.json"]


def test_what_was_there_stays_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full."""
    path = tmp_path / "t.json"
    path.write_text("before")

    def full(source: Path, target: Path) -> None:
        assert source.read_text() == to_json(SHORT)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigError, match=r"t\.json: cannot be written \(No space left on device\)$"):
        write_costs(path, SHORT)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["t.json"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    write_costs(link, SHORT)
    assert link.is_symlink()
    assert read_costs(target) == SHORT


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_costs(pipe, SHORT)
    reader.join()
    assert read == [to_json(SHORT)]


@pytest.mark.parametrize("name", ["missing/t.json", "."])
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_costs(tmp_path / name, SHORT)
