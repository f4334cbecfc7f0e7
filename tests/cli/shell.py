"""Runs the command line: in this process where its output is what matters, in one of its own for what a shell sees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner, Result

from rrfp.commands.app import app


def rrfp(*arguments: str | Path) -> Result:
    """In this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def rrfp_process(
    *arguments: str | Path, cwd: Path | None = None, hash_seed: int = 0, timeout_s: float = 50
) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    command = [sys.executable, "-m", "rrfp", *map(str, arguments)]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "COLUMNS": "200"}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=timeout_s, check=False
    )
