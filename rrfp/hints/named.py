"""Hints as a user writes them on a command line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rrfp.core.hint import Hint
from rrfp.core.naming import named_or_loaded
from rrfp.errors import ConfigError
from rrfp.hints.registry import HintSpec, create_hint, hint_names


@dataclass(frozen=True, slots=True)
class LoadedHint:
    """Makes the hint that a text with a colon leads to; another process can load it as well."""

    text: str

    def __call__(self) -> Hint:
        """A fresh hint."""
        return create_hint(_loaded(self.text))


@lru_cache(maxsize=64)
def _loaded(text: str) -> Any:
    return named_or_loaded("hint", text)


def named_or_loaded_hint(text: str) -> HintSpec:
    """The argument of `create_hint` for the user's ``text``; tried once.

    Raises:
        ConfigError: if the name is unknown, or the object makes no hint.
    """
    if ":" not in text and not text.endswith(".py") and text not in hint_names():
        names = ", ".join(hint_names())
        raise ConfigError(f"hint is {text!r}, must be one of: {names}, or module:attribute, or file.py:attribute")
    spec: HintSpec = LoadedHint(text) if ":" in text else named_or_loaded("hint", text)
    try:
        create_hint(spec)
    except ConfigError:
        raise
    except Exception as error:  # the user's class may raise anything
        raise ConfigError(f"hint is {text!r}: cannot be made ({type(error).__name__}: {error})") from error
    return spec
