"""`rrfp secret` makes a secret, on paper or in a file that only its owner may use."""

from __future__ import annotations

import json
import os
import re
import resource
from pathlib import Path

import pytest
from cli.shell import rrfp

from rrfp.transports.secret import Secret


def test_it_prints_a_new_secret_each_time() -> None:
    first, second = rrfp("secret").stdout, rrfp("secret").stdout
    assert re.fullmatch(r"[0-9a-f]{64}\n", first)
    assert first != second
    assert re.fullmatch("[0-9a-f]{64}", json.loads(rrfp("secret", "--json").stdout)["secret"])


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_it_writes_a_file_that_ranks_accept_and_prints_no_secret(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "secret"
    before = os.umask(umask)
    try:
        result = rrfp("secret", str(path))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Secret.from_environment({"RRFP_SECRET_FILE": str(path)}) is not None
    assert path.read_text().strip() not in result.stdout
    assert f"wrote {path}" in result.stdout


def test_it_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    assert json.loads(rrfp("secret", str(path), "--json").stdout) == {"file": str(path)}
    text = path.read_text()
    result = rrfp("secret", str(path))
    assert result.exit_code == 2
    assert f"{path}: exists, must be a new file" in result.output
    assert path.read_text() == text
    result = rrfp("secret", str(tmp_path / "no" / "folder"))
    assert result.exit_code == 2
    assert "cannot be written" in result.output


def test_doctor_names_the_secrets_place_and_not_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    rrfp("secret", str(path))
    monkeypatch.setenv("RRFP_SECRET_FILE", str(path))
    result = rrfp("doctor", "--json")
    assert json.loads(result.stdout)["checks"]["secret"]["detail"].startswith(f"in RRFP_SECRET_FILE '{path}'")
    assert path.read_text().strip() not in result.output
    path.chmod(0o644)
    assert "0644" in json.loads(rrfp("doctor", "--json").stdout)["checks"]["secret"]["detail"]


def test_a_full_disk_is_a_line_and_leaves_no_file(tmp_path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, most))  # writing fails there, as on a full disk
    try:
        result = rrfp("secret", tmp_path / "secret")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "secret: cannot be written (File too large)" in result.stderr
    assert not (tmp_path / "secret").exists()
