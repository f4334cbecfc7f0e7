"""Trouble of one rank with a checkpoint: all ranks raise the same error, which names it, and none waits for it."""

from __future__ import annotations

import re
from pathlib import Path

import fork_server as forked
import pytest
from fork_server import fork_server

__all__ = ["fork_server"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


def test_all_ranks_raise_what_fails_on_one(tmp_path: Path) -> None:
    first, second = forked.reports("runtime/checkpoint_failures.py", str(tmp_path), ranks=2, timeout_s=60)
    for report in (first, second):
        errors = report["errors"]
        assert errors["extra"].startswith("ConfigError: rank 1's extra is a function, must be plain data")
        assert errors["optimizer"].startswith("ConfigError: optimizer is SGD, must be of the class that was saved")
        assert errors["full"].startswith(f"RrfpError: checkpoint {tmp_path}/000002-step-2 cannot be written: rank 1: ")
        assert errors["after"] == errors["full"], "the next call raises it, too"
        # Half of the checkpoint for which there was no room is not left, and gives its number back.
        assert report["left"] == ["000001-step-1", "000002-step-2"]
        # The ranks share the entries that all of them have: any of them may have one to read from that file.
        text = rf"RrfpError: checkpoint {tmp_path}/000002-step-2 cannot be read: rank [01]: FileNotFoundError: .*__1_0"
        assert re.match(text, errors["half"])
        assert errors["half"].endswith(
            f"; pass path='{tmp_path}/000001-step-1', or delete this one, to go on from there"
        )
        assert errors["older"] == "none"
