"""Plugins as a user writes them: a registered name, ``module:attribute``, or ``file.py:attribute``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rrfp.errors import ConfigError


def named_or_loaded(field: str, text: str) -> Any:
    """``text`` itself where it is a name; with a colon, the object that it names.

    Args:
        field: for errors.
        text: the user's. Modules are also looked up in the working directory.

    Raises:
        ConfigError: if the module cannot be imported or has no such attribute.
    """
    home, colon, attribute = text.rpartition(":")
    if not colon and text.endswith(".py"):
        raise ConfigError(f"{field} is {text!r}, must be a name, module:attribute or file.py:attribute")
    if not colon:
        return text
    try:
        module = _from_file(Path(home)) if home.endswith(".py") else _from_path(home)
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(f"{field} is {text!r}: cannot import {home!r} ({type(error).__name__}: {error})") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"{field} is {text!r}: {home!r} has no attribute {attribute!r}") from None


def _from_path(name: str) -> ModuleType:
    # A console script's path begins with the script's own folder; `python -m` would have the working directory there.
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(name)


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a name that ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
