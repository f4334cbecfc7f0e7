"""Errors of the caller's own code, without the one in which torch's stages wrap them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

#: The first line of torch's wrappers.
_WRAPPER = re.compile(r"\s*(\[Stage \d+\] failed to run forward:|Failed to run stage backward)")


def unwrapped(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of ``call``, of torch's.

    What the caller's module raises in it passes as it was raised, with a note that has torch's text: the arguments.
    """
    try:
        return call(*args, **kwargs)
    except RuntimeError as error:
        cause, text = error.__cause__, str(error)
        if not isinstance(cause, Exception) or not _WRAPPER.match(text):
            raise
    cause.add_note(" ".join(text.split()))
    raise cause
