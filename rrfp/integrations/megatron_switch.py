"""The environment variable ``RRFP_MEGATRON``: `rrfp.integrations.megatron.enable` where no script can be edited.

torch calls `enable_if_asked` at the end of its import, by an entry point of the group ``torch.backends``: in every
process of a job, whoever starts it, before Megatron is imported. RRFP is then enabled when Megatron's schedules are
imported. Without the variable it does nothing.

Rejected: a ``sitecustomize`` module on PYTHONPATH, which hides others of that name; and a ``.pth`` file, which every
start of Python would read.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: ``1``, or the options of `enable` as a JSON object.
VARIABLE = "RRFP_MEGATRON"

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


def enable_if_asked() -> None:
    """Enable RRFP when Megatron's schedules are imported, if the environment variable says so."""
    text = os.environ.get(VARIABLE, "").strip()
    if text in ("", "0"):
        return
    options = options_of(text)
    if _SCHEDULES in sys.modules:
        _enable(options)
    else:
        sys.meta_path.insert(0, _Importing(options))


def options_of(text: str) -> dict[str, Any]:
    """The options in the value of the environment variable; a ValueError for any other text."""
    if text == "1":
        return {}
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ValueError(
            f'{VARIABLE} is {text!r}, must be 1, 0, or the options of enable() as a JSON object: {{"limit": "2n"}}'
        )
    return options


class _Importing(MetaPathFinder):
    """Finds Megatron's schedules as others would, once, and enables RRFP behind their import."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _SCHEDULES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_enable(module: ModuleType) -> None:
                execute(module)
                _enable(self._options)

            spec.loader.exec_module = then_enable  # type: ignore[method-assign]
        return spec


def _enable(options: dict[str, Any]) -> None:
    from rrfp.integrations.megatron import enable

    enable(**options)
    logging.getLogger(__name__).info("%s: RRFP runs Megatron's pipelined schedules, with %s", VARIABLE, options)
