"""What texts for people call a virtual stage: by its part where the model has parts, else by its number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

#: The text for a virtual stage.
TextOf = Callable[[int], str]


def numbered(virtual_stage: int) -> str:
    """Such as ``virtual stage 3``: the text in a pipeline without parts."""
    return f"virtual stage {virtual_stage}"


def named(names: Sequence[str]) -> TextOf:
    """The texts for the virtual stages with ``names``, as a graph of parts has them; `numbered` where there are none.

    Such as ``part 'audio'``, or ``module 1 of part 'lm'`` for ``lm.1``: a part with several modules.
    """
    return partial(_named, names) if names else numbered


def _named(names: Sequence[str], virtual_stage: int) -> str:
    part, has_several, number = names[virtual_stage].partition(".")
    return f"module {number} of part {part!r}" if has_several else f"part {part!r}"
