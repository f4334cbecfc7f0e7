"""Runs command lines of the documentation in forked processes, on the checkout."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

import fork_server


class ForkedShell:
    """In place of `installed.Installed`, in a tenth of the time: nothing is imported anew.

    Args:
        packages: folders with packages that are installed beside.
        variables: of the environment.
    """

    def __init__(self, *packages: Path, variables: Mapping[str, str] | None = None) -> None:
        paths = filter(None, [*map(str, packages), os.environ.get("PYTHONPATH", "")])
        self._variables = {**(variables or {}), "PYTHONPATH": os.pathsep.join(paths)}

    def printed(self, command: str, cwd: Path, timeout_s: float = 100) -> str:
        """What a command that must succeed prints. It is one of python, rrfp and torchrun, on one machine."""
        program, *words = shlex.split(command)
        ranks = None
        if program == "torchrun":
            assert words[:2] == ["--standalone", "--nproc-per-node"], command
            ranks, words = int(words[2]), words[3:]
        elif program == "rrfp":
            words = ["-m", "rrfp", *words]
        else:
            assert program == "python", command
        return fork_server.printed(*words, ranks=ranks, cwd=cwd, timeout_s=timeout_s, variables=self._variables)
