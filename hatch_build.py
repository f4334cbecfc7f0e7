"""Fetches the report's plotting library when a wheel is built; without npm or a network the wheel has none."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class FetchLibrary(BuildHookInterface):
    """The library's own file does it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library = runpy.run_path(str(Path(self.root, "rrfp", "lab", "report", "library.py")))
        library["main"]()
